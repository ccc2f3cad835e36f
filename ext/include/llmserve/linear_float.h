// Products with float32, float16 and bfloat16 weights. Included by linear_body.h.
#pragma once

#include "llmserve/linear_rows.h"

namespace llmserve {
namespace {

constexpr int kFloatChunk = 128;  // columns of an unpacked tile of float weights

// A format's unpack8 turns 32 bytes of each of eight rows into columns, one lane per row.
struct Float32 {
  static constexpr int kBytes = 4;
  static LLMSERVE_INLINE void unpack8(I32x8 rows[8], F32x8* columns) {
    transpose(rows);
    for (int i = 0; i < 8; ++i) columns[i] = (F32x8)rows[i];
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static LLMSERVE_INLINE void unpack8(I32x8 rows[8], F32x8* columns) {
    transpose(rows);
    for (int i = 0; i < 8; ++i) {
      columns[2 * i] = Isa::from_half(__builtin_convertvector(rows[i] & 0xffff, U16x8));
      columns[2 * i + 1] = Isa::from_half(__builtin_convertvector((U32x8)rows[i] >> 16, U16x8));
    }
  }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static LLMSERVE_INLINE void unpack8(I32x8 rows[8], F32x8* columns) {
    transpose(rows);
    for (int i = 0; i < 8; ++i) {
      columns[2 * i] = (F32x8)(rows[i] << 16);
      columns[2 * i + 1] = (F32x8)((U32x8)rows[i] & 0xffff0000u);
    }
  }
};

template <class Format>
constexpr int kColumnsIn32Bytes = 32 / Format::kBytes;

// Unpacks `num_cols` columns of eight rows; those that are missing up to a full load are 0.
template <class Format>
LLMSERVE_INLINE void unpack_columns(const uint8_t* const rows[kUnpackedRows], int64_t num_cols,
                                    F32x8* columns) {
  I32x8 block[8];
  for (int r = 0; r < kUnpackedRows; ++r) {
    if (num_cols >= kColumnsIn32Bytes<Format>) {
      block[r] = load<I32x8>(rows[r]);
      continue;
    }
    alignas(32) uint8_t buffer[32] = {};
    __builtin_memcpy(buffer, rows[r], static_cast<size_t>(num_cols) * Format::kBytes);
    block[r] = load<I32x8>(buffer);
  }
  Format::unpack8(block, columns);
}

// Adds kGroups groups of 32 columns (the last may be shorter) for kTokens tokens. tile[c] has column
// c of the rows. Groups are summed apart: that is more exact than one long chain, and the chains
// of several groups can run beside one another.
template <int kTokens, int kGroups>
LLMSERVE_INLINE void add_float_groups(const float (*tile)[kTileRows], int group_cols,
                                      const float* x, int64_t stride, float (*out)[kTileRows]) {
  V sums[kGroups][kTokens] = {};
  for (int c = 0; c < group_cols; ++c) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const int col = g * kGroup + c;
        sums[g][t] = Isa::fma(load<V>(tile[col]), splat<V>(x[t * stride + col]), sums[g][t]);
      }
    }
  }
  for (int g = 0; g < kGroups; ++g) {
    for (int t = 0; t < kTokens; ++t) store(out[t], load<V>(out[t]) + sums[g][t]);
  }
}

template <int kTokens>
LLMSERVE_INLINE void multiply_float_chunk(const float (*tile)[kTileRows], int num_cols,
                                          const float* x, int64_t stride,
                                          float (*out)[kTileRows]) {
  if constexpr (kTokens <= 2) {
    if (num_cols == kFloatChunk) {
      add_float_groups<kTokens, kFloatChunk / kGroup>(tile, kGroup, x, stride, out);
      return;
    }
  }
  for (int begin = 0; begin < num_cols; begin += kGroup) {
    const int left = num_cols - begin;
    add_float_groups<kTokens, 1>(tile + begin, left < kGroup ? left : kGroup, x + begin, stride,
                                 out);
  }
}

template <class Format>
LLMSERVE_INLINE void unpack_float_tile(const uint8_t* const rows[kTileRows], int64_t num_cols,
                                       int64_t prefetch_lead, float (*tile)[kTileRows]) {
  constexpr int kCols = kColumnsIn32Bytes<Format>;
  for (int64_t c = 0; c < num_cols; c += kCols) {
    for (int first = 0; first < kTileRows; first += kUnpackedRows) {
      const uint8_t* block[kUnpackedRows];
      for (int r = 0; r < kUnpackedRows; ++r) {
        block[r] = rows[first + r] + c * Format::kBytes;
        if (c % (2 * kCols) == 0) prefetch_range(block[r] + prefetch_lead, 64);
      }
      F32x8 columns[kCols];
      unpack_columns<Format>(block, num_cols - c, columns);
      for (int i = 0; i < kCols; ++i) store(tile[c + i] + first, columns[i]);
    }
  }
}

template <class Format>
void multiply_float(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t num_cols = args.weight.num_cols;
  const int64_t row_bytes = num_cols * Format::kBytes;
  alignas(64) float tile[kFloatChunk][kTileRows];
  alignas(64) float total[kTokenBlock][kTileRows];
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const uint8_t* rows[kTileRows];
      find_rows<kTileRows>(args.weight, row_bytes, row, rows);
      for (int t = 0; t < num_tokens; ++t) store(total[t], V{});
      for (int64_t begin = 0; begin < num_cols; begin += kFloatChunk) {
        const int cols =
            static_cast<int>(num_cols - begin < kFloatChunk ? num_cols - begin : kFloatChunk);
        unpack_float_tile<Format>(rows, cols, kPrefetchRows * row_bytes, tile);
        for (int r = 0; r < kTileRows; ++r) rows[r] += cols * Format::kBytes;
        const float* x = args.x + first * num_cols + begin;
        for_token_groups<8>(num_tokens, [&](auto tokens, int t) {
          multiply_float_chunk<decltype(tokens)::value>(tile, cols, x + t * num_cols, num_cols,
                                                        total + t);
        });
      }
      store_rows<kTileRows, V>(args, row, first, num_tokens, total);
    }
  }
}

template <class Format>
void dequantize_float_row(const Matrix& weight, int64_t row_id, float* out) {
  const int64_t num_cols = weight.num_cols;
  const uint8_t* row = weight.data + row_id * num_cols * Format::kBytes;
  constexpr int kCols = kColumnsIn32Bytes<Format>;
  for (int64_t c = 0; c < num_cols; c += kCols) {
    const uint8_t* rows[kUnpackedRows];
    for (int r = 0; r < kUnpackedRows; ++r) rows[r] = row + c * Format::kBytes;
    F32x8 columns[kCols];
    unpack_columns<Format>(rows, num_cols - c, columns);
    for (int64_t i = 0; i < kCols && c + i < num_cols; ++i) out[c + i] = columns[i][0];
  }
}

}  // namespace
}  // namespace llmserve
