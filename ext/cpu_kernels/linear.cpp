#include "llmserve/linear.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "llmserve/instruction_set.h"
#include "llmserve/parallel.h"

namespace llmserve {
namespace {

constexpr int64_t kChunkCols = 256;
constexpr int kBFloat16 = 30;  // number of the ggml type

// Work that is worth waking a thread for, in multiply-adds and in bytes of weights.
constexpr int64_t kMinMultiplies = 1 << 16;
constexpr int64_t kMinQuantized = 1 << 13;

const LinearKernels& kernels() {
#if defined(__x86_64__)
  switch (get_instruction_set()) {
    case InstructionSet::kAvx512Bf16:
    case InstructionSet::kAvx512Vnni:
      return kLinearAvx512Vnni;
    case InstructionSet::kAvx2:
      return kLinearAvx2;
    case InstructionSet::kPortable:
      return kLinearPortable;
  }
#endif
  return kLinearPortable;
}

// Elements and bytes of a block, from the GGUF specification.
struct BlockSize {
  int64_t num_cols;
  int64_t num_bytes;
};

BlockSize block_size(int type) {
  switch (type & kTypeMask) {
    case 0:
      return {1, 4};
    case 1:
    case 30:
      return {1, 2};
    case 2:
      return {32, 18};
    case 3:
      return {32, 20};
    case 6:
      return {32, 22};
    case 7:
      return {32, 24};
    case 8:
      return {32, 34};
    case 10:
      return {256, 84};
    case 11:
      return {256, 110};
    case 12:
      return {256, 144};
    case 13:
      return {256, 176};
    case 14:
      return {256, 210};
  }
  throw std::invalid_argument("ggml type " + std::to_string(type) + " is not supported");
}

bool is_quantized(int64_t type) { return block_size(static_cast<int>(type)).num_cols > 1; }

// Null if the CPU has no such instructions, or a part is not as they need it.
const ByteKernels* byte_kernels(const LinearPart* parts, int64_t num_parts) {
#if defined(__x86_64__)
  if (get_instruction_set() < InstructionSet::kAvx512Vnni) return nullptr;
  for (int64_t i = 0; i < num_parts; ++i) {
    const int64_t type = parts[i].type;
    if (!(type & kByteActivations) || !(type & kPacked) || !is_quantized(type)) return nullptr;
  }
  return &kBytesAvx512Vnni;
#else
  return nullptr;
#endif
}

// Null if the CPU has no such instructions.
const BFloat16Kernels* bfloat16_kernels() {
#if defined(__x86_64__)
  if (get_instruction_set() == InstructionSet::kAvx512Bf16) return &kBFloat16Avx512;
#endif
  return nullptr;
}

// Room for rounded activations, kept for the next call of the same thread.
template <typename T>
T* scratch(size_t count) {
  thread_local std::unique_ptr<void, decltype(&std::free)> memory{nullptr, &std::free};
  thread_local size_t capacity = 0;
  if (count > capacity) {
    const size_t num_bytes = (count * sizeof(T) + 63) / 64 * 64;
    memory.reset(std::aligned_alloc(64, num_bytes));
    capacity = memory ? count : 0;
    if (!memory) throw std::bad_alloc();
  }
  return static_cast<T*>(memory.get());
}

}  // namespace

void linear(const float* x, const LinearPart* parts, int64_t num_parts, float* out,
            int64_t num_tokens) {
  const LinearKernels& k = kernels();
  if (num_tokens == 0 || num_parts == 0) return;
  const int64_t num_cols = parts[0].num_cols;
  int64_t num_rows = 0, num_tiles = 0;
  bool has_quantized = false, has_bfloat16 = false;
  for (int64_t i = 0; i < num_parts; ++i) {
    num_rows += parts[i].num_rows;
    num_tiles += divide_up(parts[i].num_rows, k.tile_rows);
    has_quantized |= is_quantized(parts[i].type);
    has_bfloat16 |= (parts[i].type & kTypeMask) == kBFloat16;
  }
  const BFloat16Kernels* bfloat16 = has_bfloat16 ? bfloat16_kernels() : nullptr;
  const int64_t num_chunks = divide_up(num_cols, kChunkCols);
  const int64_t grain = divide_up(kMinQuantized, num_cols + 1);
  const ByteKernels* bytes = byte_kernels(parts, num_parts);
  ActivationChunk* chunks = nullptr;
  ByteChunk* byte_chunks = nullptr;
  if (bytes) {
    byte_chunks = scratch<ByteChunk>(static_cast<size_t>(num_chunks * num_tokens));
    parallel_for(num_tokens, grain, [&](int64_t begin, int64_t end) {
      bytes->quantize(x, num_cols, num_tokens, begin, end, byte_chunks);
    });
  } else if (has_quantized) {
    const int64_t chunk_tokens = padded_tokens(num_tokens);
    chunks = scratch<ActivationChunk>(static_cast<size_t>(num_chunks * chunk_tokens));
    for (int64_t i = 0; i < num_chunks && num_tokens < chunk_tokens; ++i) {
      for (int64_t t = num_tokens; t < chunk_tokens; ++t) chunks[i * chunk_tokens + t] = {};
    }
    const float max_quant = parts[0].type & kByteActivations ? kMaxByteQuant : kMaxQuant;
    parallel_for(num_tokens, grain, [&](int64_t begin, int64_t end) {
      k.quantize(x, num_cols, max_quant, chunk_tokens, begin, end, chunks);
    });
  }
  uint16_t* x_bfloat16 = nullptr;
  if (bfloat16) {
    x_bfloat16 = scratch<uint16_t>(static_cast<size_t>(bfloat16_stride(num_cols) * num_tokens));
    parallel_for(num_tokens, grain, [&](int64_t begin, int64_t end) {
      bfloat16->round(x, num_cols, begin, end, x_bfloat16);
    });
  }
  const int64_t tile_cost = k.tile_rows * (num_cols + 1) * num_tokens;
  parallel_for(num_tiles, divide_up(kMinMultiplies, tile_cost), [&](int64_t begin, int64_t end) {
    float* part_out = out;
    for (int64_t i = 0; i < num_parts; ++i) {
      const LinearPart& part = parts[i];
      const Matrix weight{part.data, static_cast<int>(part.type) & ~kByteActivations,
                          part.num_rows, num_cols};
      const int64_t tiles = divide_up(part.num_rows, k.tile_rows);
      const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, tiles);
      if (first < last) {
        const bool is_bfloat16 = (weight.type & kTypeMask) == kBFloat16;
        const auto multiply = bytes                     ? bytes->multiply
                              : bfloat16 && is_bfloat16 ? bfloat16->multiply
                                                        : k.multiply;
        multiply({x, chunks, byte_chunks, x_bfloat16, weight, part.bias, part_out, num_rows,
                  num_tokens},
                 first * k.tile_rows, std::min(last * k.tile_rows, part.num_rows));
      }
      begin -= tiles;
      end -= tiles;
      part_out += part.num_rows;
    }
  });
}

void embedding(const int64_t* row_ids, const Matrix& weight, float scale, float* out,
               int64_t num_ids) {
  block_size(weight.type);  // raises for an unknown one
  for (int64_t i = 0; i < num_ids; ++i) {
    if (row_ids[i] < 0 || row_ids[i] >= weight.num_rows) {
      throw std::out_of_range("token id " + std::to_string(row_ids[i]) + " is outside of the " +
                              std::to_string(weight.num_rows) + " rows of the embedding");
    }
  }
  const LinearKernels& k = kernels();
  parallel_for(num_ids, divide_up(kMinQuantized, weight.num_cols + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   float* row = out + i * weight.num_cols;
                   k.dequantize_row(weight, row_ids[i], row);
                   if (scale == 1.0f) continue;
                   for (int64_t c = 0; c < weight.num_cols; ++c) row[c] *= scale;
                 }
               });
}

void dequantize(const Matrix& weight, float* out) {
  block_size(weight.type);  // raises for an unknown one
  const LinearKernels& k = kernels();
  parallel_for(weight.num_rows, divide_up(kMinQuantized, weight.num_cols + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   k.dequantize_row(weight, r, out + r * weight.num_cols);
                 }
               });
}

}  // namespace llmserve
