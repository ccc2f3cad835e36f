// Plain float32 arithmetic: products for float32 activations or for weights of another float type,
// and rows of quantised matrices as floats.
#pragma once

#include "llmserve/cuda/linear_tile.h"

namespace llmserve::cuda {

constexpr int kRowWarps = 4;    // one row each
constexpr int kRowTokens = 4;   // that share a pass over the weights
constexpr int kDecodeThreads = 128;

template <typename T>
LLMSERVE_DEVICE void load_four(const T* address, float (&values)[4]) {
  if constexpr (sizeof(T) == 4) {
    unpack<T>(load16(address), values);
  } else {
    uint32_t words[2];
    load_words(reinterpret_cast<const uint8_t*>(address), words);
    unpack_pair<T>(words[0], values[0], values[1]);
    unpack_pair<T>(words[1], values[2], values[3]);
  }
}

// Adds weight[0..3] * x[token][column..] to the sums of up to kRowTokens tokens.
template <typename T>
LLMSERVE_DEVICE void add_four(const float (&weight)[4], const LinearArgs& args, int64_t first_token,
                              int64_t column, float (&sums)[kRowTokens]) {
#pragma unroll
  for (int i = 0; i < kRowTokens; ++i) {
    if (first_token + i >= args.num_tokens) continue;
    const auto* x = static_cast<const T*>(args.x) + (first_token + i) * args.num_cols + column;
    float values[4];
    load_four(x, values);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i] = fmaf(weight[j], values[j], sums[i]);
  }
}

LLMSERVE_DEVICE void finish_row(const LinearArgs& args, const KernelPart& part, int64_t row,
                                int64_t first_token, const float (&sums)[kRowTokens]) {
#pragma unroll
  for (int i = 0; i < kRowTokens; ++i) {
    float sum = warp_sum(sums[i]);
    if (lane_id() != 0 || first_token + i >= args.num_tokens) continue;
    if (part.bias != nullptr) sum += part.bias[row];
    const int64_t index = (first_token + i) * args.out_stride + part.out_column + row;
    store_value(args.out, args.out_type, index, sum);
  }
}

// One warp's row and tokens. Blocks of x cover the rows of all parts, tile by tile.
struct RowPlace {
  const KernelPart& part;
  int64_t row;
  int64_t first_token;

  LLMSERVE_DEVICE explicit RowPlace(const LinearArgs& args)
      : part(part_of_tile(args, blockIdx.x / (kTileRows / kRowWarps))),
        row((static_cast<int64_t>(blockIdx.x) - part.first_tile * (kTileRows / kRowWarps)) *
                kRowWarps +
            warp_id()),
        first_token(static_cast<int64_t>(blockIdx.y) * kRowTokens) {}
};

// A lane takes every eighth chunk's share of one lane, so a warp reads eight chunks at a time.
template <class F, typename T>
__global__ void __launch_bounds__(kRowWarps* kWarpSize) linear_row(const LinearArgs args) {
  const RowPlace place(args);
  if (place.row >= place.part.num_rows) return;
  const int num_chunks = chunks_in_row<F>(args.num_cols);
  const int t = lane_id() % kLanesInChunk;
  float sums[kRowTokens] = {};
  for (int chunk = lane_id() / kLanesInChunk; chunk < num_chunks;
       chunk += kWarpSize / kLanesInChunk) {
    Raw<F> raw;
    raw.load(place.part, static_cast<int>(place.row), chunk, num_chunks, t);
#pragma unroll
    for (int w = 0; w < F::kGroups; ++w) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int column = chunk * F::kChunk + w * kGroup + quad_column<F>(t, q);
        if (column >= args.num_cols) continue;
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[i] = raw.value(chunk, w, 4 * q + i);
        add_four<T>(weight, args, place.first_token, column, sums);
      }
    }
  }
  finish_row(args, place.part, place.row, place.first_token, sums);
}

// W: the weight's float type.
template <typename W, typename T>
__global__ void __launch_bounds__(kRowWarps* kWarpSize) linear_float_row(const LinearArgs args) {
  constexpr int kRun = 16 / sizeof(W);
  const RowPlace place(args);
  if (place.row >= place.part.num_rows) return;
  const W* const row = reinterpret_cast<const W*>(place.part.low) + place.row * args.num_cols;
  float sums[kRowTokens] = {};
#pragma unroll 4
  for (int64_t column = lane_id() * kRun; column < args.num_cols; column += kWarpSize * kRun) {
    float values[kRun];
    unpack<W>(load16_streaming(row + column), values);
#pragma unroll
    for (int q = 0; q < kRun / 4; ++q) {
      const float four[4] = {values[4 * q], values[4 * q + 1], values[4 * q + 2],
                             values[4 * q + 3]};
      add_four<T>(four, args, place.first_token, column + 4 * q, sums);
    }
  }
  finish_row(args, place.part, place.row, place.first_token, sums);
}

struct DecodeArgs {
  KernelPart part;
  const int64_t* row_ids;  // or null: from first_row on
  int64_t first_row;
  void* out;
  Format out_type;
  int64_t num_rows;
  int64_t num_cols;
};

template <typename T>
LLMSERVE_DEVICE void store_four(void* out, int64_t index, const float (&values)[4]) {
  T* const address = static_cast<T*>(out) + index;
  if constexpr (sizeof(T) == 4) {
    store16(address, pack<T>(values));
  } else {
    const uint64_t high = pack_pair<T>(values[2], values[3]);
    *reinterpret_cast<uint64_t*>(address) = high << 32 | pack_pair<T>(values[0], values[1]);
  }
}

// A thread decodes one lane's share of a chunk of a row. num_cols is a multiple of 8.
template <class F>
__global__ void __launch_bounds__(kDecodeThreads) decode_rows(const DecodeArgs args) {
  const int num_chunks = chunks_in_row<F>(args.num_cols);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kDecodeThreads + threadIdx.x;
  const int64_t out_row = index / (num_chunks * kLanesInChunk);
  if (out_row >= args.num_rows) return;
  const int share = static_cast<int>(index % (num_chunks * kLanesInChunk));
  const int chunk = share / kLanesInChunk;
  const int t = share % kLanesInChunk;
  const int64_t row = args.row_ids == nullptr ? args.first_row + out_row : args.row_ids[out_row];
  const bool is_inside = row >= 0 && row < args.part.num_rows;
  Raw<F> raw;
  raw.load(args.part, is_inside ? static_cast<int>(row) : 0, chunk, num_chunks, t);
#pragma unroll
  for (int w = 0; w < F::kGroups; ++w) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int column = chunk * F::kChunk + w * kGroup + quad_column<F>(t, q);
      if (column >= args.num_cols) continue;
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = is_inside ? raw.value(chunk, w, 4 * q + i) : 0.0f;
      const int64_t target = out_row * args.num_cols + column;
      if (args.out_type == Format::F32) {
        store_four<float>(args.out, target, values);
      } else if (args.out_type == Format::F16) {
        store_four<half>(args.out, target, values);
      } else {
        store_four<bfloat16>(args.out, target, values);
      }
    }
  }
}

inline Dim3 row_grid(const LinearArgs& args) {
  return Dim3(static_cast<unsigned>(num_tiles(args) * (kTileRows / kRowWarps)),
              static_cast<unsigned>(ceil_div(args.num_tokens, static_cast<int64_t>(kRowTokens))));
}

template <typename W, typename T>
void launch_float_rows(const LinearArgs& args, Stream stream) {
  launch(&linear_float_row<W, T>, row_grid(args), Dim3(kRowWarps * kWarpSize), 0, stream, args);
}

// The launchers of a quantised format; each .cu file instantiates some formats.
template <class F>
void launch_linear(const LinearArgs& args, Format x_type, Stream stream);

template <class F>
void launch_decode(const DecodeArgs& args, Stream stream);

// Those of float weights, by their type W.
template <typename W>
void launch_float_linear(const LinearArgs& args, Format x_type, Stream stream);

}  // namespace llmserve::cuda
