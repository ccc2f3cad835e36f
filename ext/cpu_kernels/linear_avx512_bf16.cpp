// Products with bfloat16 weights in AVX-512 BF16: vdpbf16ps adds the products of two neighbouring
// columns to a float32, twice as many multiply-adds an instruction as float32 has. Activations are
// rounded to bfloat16, as the weights were.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "llmserve/linear.h"
#include "llmserve/target_avx512_bf16.h"
//
#include "llmserve/linear_avx512.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // as in linear_avx512_vnni.cpp
#endif

namespace llmserve {
namespace {

struct Isa : Avx512 {
  using Floats = F32x16;
  static constexpr int kTileRows = 16;
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_rows.h"

namespace llmserve {
namespace {

constexpr int kColumnsInBlock = 16;  // 32 bytes of each row are transposed at a time
constexpr int kPairsInBlock = kColumnsInBlock / 2;
constexpr int kChunkColumns = 256;
// A lane has a row, and in it two neighbouring columns.
using Pairs = int32_t[kTileRows];

void round_activations(const float* x, int64_t num_cols, int64_t begin, int64_t end,
                       uint16_t* out) {
  const int64_t stride = bfloat16_stride(num_cols);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < stride; c += kColumnsInBlock) {
      const int64_t left = num_cols - c;
      const auto mask = static_cast<__mmask16>(left < kColumnsInBlock ? (1 << left) - 1 : 0xffff);
      const __m512 values = _mm512_maskz_loadu_ps(mask, x + t * num_cols + c);
      store(out + t * stride + c, _mm512_cvtneps_pbh(values));
    }
  }
}

// Columns that are missing up to a whole block are 0.
LLMSERVE_INLINE void unpack_block(const uint8_t* const rows[kTileRows], int64_t num_cols,
                                  Pairs* pairs) {
  U8x32 block[kTileRows];
  for (int r = 0; r < kTileRows; ++r) {
    if (num_cols >= kColumnsInBlock) {
      block[r] = load<U8x32>(rows[r]);
      continue;
    }
    alignas(32) uint8_t buffer[32] = {};
    __builtin_memcpy(buffer, rows[r], static_cast<size_t>(num_cols) * sizeof(uint16_t));
    block[r] = load<U8x32>(buffer);
  }
  I32x16 quads[kPairsInBlock];
  Isa::transpose_quads(block, quads);
  for (int p = 0; p < kPairsInBlock; ++p) store(pairs[p], quads[p]);
}

// Adds a chunk to the totals of kTokens tokens. Two sums each, so that one instruction need not
// wait for the last.
template <int kTokens>
LLMSERVE_INLINE void add_chunk(const Pairs* tile, int num_pairs, const uint16_t* x, int64_t stride,
                               float (*total)[kTileRows]) {
  __m512 sums[2][kTokens];
  for (auto& sum : sums) {
    for (int t = 0; t < kTokens; ++t) sum[t] = _mm512_setzero_ps();
  }
  for (int p = 0; p < num_pairs; p += 2) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const auto w = load<__m512bh>(tile[p + i]);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const auto pair = load<int32_t>(x + t * stride + 2 * (p + i));
        sums[i][t] = _mm512_dpbf16_ps(sums[i][t], w, (__m512bh)_mm512_set1_epi32(pair));
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    store(total[t], load<V>(total[t]) + ((V)sums[0][t] + (V)sums[1][t]));
  }
}

void multiply(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t num_cols = args.weight.num_cols;
  const int64_t row_bytes = num_cols * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t stride = bfloat16_stride(num_cols);
  alignas(64) Pairs tile[kChunkColumns / 2];
  alignas(64) float total[kTokenBlock][kTileRows];
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const uint8_t* rows[kTileRows];
      find_rows<kTileRows>(args.weight, row_bytes, row, rows);
      for (int t = 0; t < num_tokens; ++t) store(total[t], V{});
      for (int64_t begin = 0; begin < num_cols; begin += kChunkColumns) {
        const int64_t cols_left = num_cols - begin;
        const int cols = static_cast<int>(cols_left < kChunkColumns ? cols_left : kChunkColumns);
        for (int c = 0; c < cols; c += kColumnsInBlock) {
          for (int r = 0; r < kTileRows; ++r) {
            if (c % 32 == 0) prefetch_range(rows[r] + kPrefetchRows * row_bytes, 64);
          }
          unpack_block(rows, cols - c, tile + c / 2);
          for (int r = 0; r < kTileRows; ++r) rows[r] += kColumnsInBlock * sizeof(uint16_t);
        }
        const int num_pairs = (cols + kColumnsInBlock - 1) / kColumnsInBlock * kPairsInBlock;
        const uint16_t* x = args.x_bfloat16 + first * stride + begin;
        for_token_groups<8>(num_tokens, [&](auto tokens, int t) {
          add_chunk<decltype(tokens)::value>(tile, num_pairs, x + t * stride, stride, total + t);
        });
      }
      store_rows<kTileRows, V>(args, row, first, num_tokens, total);
    }
  }
}

}  // namespace

const BFloat16Kernels kBFloat16Avx512 = {round_activations, multiply};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
