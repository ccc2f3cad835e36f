// Products with float32, float16 and bfloat16 weights. Included by linear_body.h.
#pragma once

#include "llmserve/float_formats.h"
#include "llmserve/linear_rows.h"

namespace llmserve {
namespace {

constexpr int kFloatChunk = 128;  // columns of an unpacked tile of float weights

template <class Format>
constexpr int kColumnsInBlock = kRowBlock / Format::kBytes;

// Unpacks `num_cols` columns of eight rows; those that are missing up to a full block are 0.
template <class Format>
LLMSERVE_INLINE void unpack_columns(const uint8_t* const rows[kUnpackedRows], int64_t num_cols,
                                    F32x8* columns) {
  I32x8 block[8];
  for (int r = 0; r < kUnpackedRows; ++r) {
    if (num_cols >= kColumnsInBlock<Format>) {
      block[r] = load<I32x8>(rows[r]);
      continue;
    }
    alignas(32) uint8_t buffer[kRowBlock] = {};
    __builtin_memcpy(buffer, rows[r], static_cast<size_t>(num_cols) * Format::kBytes);
    block[r] = load<I32x8>(buffer);
  }
  transpose(block);
  for (int w = 0; w < 8; ++w) {
    Format::template split<Isa>(block[w], columns + w * kColumnsInWord<Format>);
  }
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

// The next columns of a tile of rows as they are stored.
template <class Format>
struct StoredFloats {
  const uint8_t* rows[kTileRows];
  int64_t prefetch_lead;

  StoredFloats(const Matrix& weight, int64_t row)
      : prefetch_lead(kPrefetchRows * weight.num_cols * Format::kBytes) {
    find_rows<kTileRows>(weight, weight.num_cols * Format::kBytes, row, rows);
  }

  LLMSERVE_INLINE void unpack(int num_cols, float (*tile)[kTileRows]) {
    constexpr int kCols = kColumnsInBlock<Format>;
    for (int c = 0; c < num_cols; c += kCols) {
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
    for (auto& row : rows) row += num_cols * Format::kBytes;
  }
};

// The same of a packed tile, where rows lie side by side already.
template <class Format>
struct PackedFloats {
  const uint8_t* words;

  PackedFloats(const Matrix& weight, int64_t row) : words(packed_floats<Format>(weight, row)) {}

  LLMSERVE_INLINE void unpack(int num_cols, float (*tile)[kTileRows]) {
    constexpr int kCols = kColumnsInWord<Format>;
    for (int c = 0; c < num_cols; c += kCols, words += kPackedWordBytes) {
      prefetch_range(words + kPrefetchBytes, 64);
      for (int first = 0; first < kTileRows; first += kUnpackedRows) {
        F32x8 columns[kCols];
        Format::template split<Isa>(load<I32x8>(words + first * kWordBytes), columns);
        for (int i = 0; i < kCols; ++i) store(tile[c + i] + first, columns[i]);
      }
    }
  }
};

template <class Format, template <class> class Rows>
void multiply_float_tiles(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t num_cols = args.weight.num_cols;
  alignas(64) float tile[kFloatChunk][kTileRows];
  alignas(64) float total[kTokenBlock][kTileRows];
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      Rows<Format> rows(args.weight, row);
      for (int t = 0; t < num_tokens; ++t) store(total[t], V{});
      for (int64_t begin = 0; begin < num_cols; begin += kFloatChunk) {
        const int cols =
            static_cast<int>(num_cols - begin < kFloatChunk ? num_cols - begin : kFloatChunk);
        rows.unpack(cols, tile);
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
void multiply_float(const LinearArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.weight.type & kPacked) {
    multiply_float_tiles<Format, PackedFloats>(args, row_begin, row_end);
  } else {
    multiply_float_tiles<Format, StoredFloats>(args, row_begin, row_end);
  }
}

template <class Format>
void dequantize_float_row(const Matrix& weight, int64_t row, float* out) {
  constexpr int kCols = kColumnsInWord<Format>;
  const bool is_packed = weight.type & kPacked;
  const int64_t row_bytes = weight.num_cols * Format::kBytes;
  const uint8_t* from =
      is_packed ? packed_floats<Format>(weight, row) : weight.data + row * row_bytes;
  for (int64_t c = 0; c < weight.num_cols; c += kCols) {
    const int64_t left = weight.num_cols - c;
    const int num_cols = static_cast<int>(left < kCols ? left : kCols);
    int32_t word = 0;
    __builtin_memcpy(&word, from, static_cast<size_t>(num_cols) * Format::kBytes);
    F32x8 columns[kCols];
    Format::template split<Isa>(broadcast(word), columns);
    for (int i = 0; i < num_cols; ++i) out[c + i] = columns[i][0];
    from += is_packed ? kPackedWordBytes : kWordBytes;
  }
}

}  // namespace
}  // namespace llmserve
