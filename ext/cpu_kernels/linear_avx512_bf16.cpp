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

#include "llmserve/float_formats.h"
#include "llmserve/linear_rows.h"

namespace llmserve {
namespace {

constexpr int kColumnsInBlock = kRowBlock / BFloat16::kBytes;
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

// The next chunk of a tile of rows as they are stored: transposed into a tile.
struct StoredRows {
  const uint8_t* rows[kTileRows];
  int64_t prefetch_lead;
  alignas(64) Pairs tile[kChunkColumns / 2];

  StoredRows(const Matrix& weight, int64_t row)
      : prefetch_lead(kPrefetchRows * weight.num_cols * BFloat16::kBytes) {
    find_rows<kTileRows>(weight, weight.num_cols * BFloat16::kBytes, row, rows);
  }

  LLMSERVE_INLINE const Pairs* next(int num_cols) {
    for (int c = 0; c < num_cols; c += kColumnsInBlock) {
      for (int r = 0; r < kTileRows; ++r) {
        if (c % 32 == 0) prefetch_range(rows[r] + prefetch_lead, 64);
      }
      unpack_block(rows, num_cols - c, tile + c / 2);
      for (auto& row : rows) row += kRowBlock;
    }
    return tile;
  }
};

// The same of a packed tile, which is multiplied where it lies.
struct PackedRows {
  const uint8_t* words;

  PackedRows(const Matrix& weight, int64_t row) : words(packed_floats<BFloat16>(weight, row)) {}

  LLMSERVE_INLINE const Pairs* next(int num_cols) {
    const auto* tile = reinterpret_cast<const Pairs*>(words);
    words += packed_floats_bytes<BFloat16>(num_cols);
    return tile;
  }
};

// Adds a chunk to the totals of kTokens tokens. Two sums each, so that one instruction need not
// wait for the last. What comes `kPrefetchBytes` later is fetched meanwhile if it lies before `last`.
template <int kTokens, bool kFetches>
LLMSERVE_INLINE void add_chunk(const Pairs* tile, int num_pairs, const uint16_t* x, int64_t stride,
                               const uint8_t* last, float (*total)[kTileRows]) {
  __m512 sums[2][kTokens];
  for (auto& sum : sums) {
    for (int t = 0; t < kTokens; ++t) sum[t] = _mm512_setzero_ps();
  }
  for (int p = 0; p < num_pairs; p += 2) {
    if (kFetches) {
      prefetch_ahead(reinterpret_cast<const uint8_t*>(tile[p]), 2 * kPackedWordBytes, last);
    }
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

template <class Rows>
void multiply_rows(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  constexpr bool kIsPacked = std::is_same<Rows, PackedRows>::value;
  const int64_t num_cols = args.weight.num_cols;
  const int64_t stride = bfloat16_stride(num_cols);
  const uint8_t* last = nullptr;
  if (kIsPacked) {
    prefetch_range(packed_floats<BFloat16>(args.weight, row_begin), kPrefetchBytes);
    last = packed_floats<BFloat16>(args.weight, row_end + kTileRows - 1);
  }
  alignas(64) float total[kTokenBlock][kTileRows];
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      Rows rows(args.weight, row);
      for (int t = 0; t < num_tokens; ++t) store(total[t], V{});
      for (int64_t begin = 0; begin < num_cols; begin += kChunkColumns) {
        const int64_t cols_left = num_cols - begin;
        const int cols = static_cast<int>(cols_left < kChunkColumns ? cols_left : kChunkColumns);
        const Pairs* tile = rows.next(cols);
        const int num_pairs = (cols + kColumnsInBlock - 1) / kColumnsInBlock * kPairsInBlock;
        const uint16_t* x = args.x_bfloat16 + first * stride + begin;
        for_token_groups<8>(num_tokens, [&](auto tokens, int t) {
          constexpr int kTokens = decltype(tokens)::value;
          if (kIsPacked && t == 0) {
            add_chunk<kTokens, true>(tile, num_pairs, x, stride, last, total);
          } else {
            add_chunk<kTokens, false>(tile, num_pairs, x + t * stride, stride, last, total + t);
          }
        });
      }
      store_rows<kTileRows, V>(args, row, first, num_tokens, total);
    }
  }
}

void multiply(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.weight.type & kPacked) {
    multiply_rows<PackedRows>(args, row_begin, row_end);
  } else {
    multiply_rows<StoredRows>(args, row_begin, row_end);
  }
}

}  // namespace

const BFloat16Kernels kBFloat16Avx512 = {round_activations, multiply};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
