// Activations quantised to 16 bits, and their products with quantised weights. Included by
// linear_body.h.
#pragma once

#include "llmserve/linear_rows.h"

namespace llmserve {
namespace {

// To max_quant steps on either side of 0, at most 32767: then a group's sum, of 16 products of
// sub * quant up to 4096 or of 32 of quants up to 255, stays below 2^31.
LLMSERVE_INLINE void quantize_group(const float* x, float max_quant, ActivationChunk& chunk,
                                    int g) {
  F32x8 v[4];
  I32x8 max_bits = {};
  for (int i = 0; i < 4; ++i) {
    v[i] = load<F32x8>(x + 8 * i);
    // Compared as integers, so that a NaN counts as the largest and reaches the scale.
    max_bits = max(max_bits, (I32x8)v[i] & 0x7fffffff);
  }
  const int32_t bits = horizontal_max(max_bits);
  const auto max_abs = load<float>(&bits);
  // The inverse of smaller numbers could overflow, and that of a NaN or an infinity is no use: such
  // groups get quants of 0. The scale of the latter makes the outputs NaN nevertheless.
  const float inverse = max_abs > 1e-33f ? max_quant / max_abs : 0.0f;
  const float scale = max_abs / max_quant;
  // 1.5 * 2^23 has a last place of 1: adding it rounds to an integer, ties to even.
  constexpr float kRounder = 0x1.8p23f;
  constexpr int32_t kRounderBits = 0x4b400000;
  I32x8 q[4];
  for (int i = 0; i < 4; ++i) {
    const F32x8 shifted = v[i] * broadcast(inverse) + kRounder;
    q[i] = inverse == 0.0f ? I32x8{} : (I32x8)shifted - kRounderBits;
  }
  for (int i = 0; i < 2; ++i) {
    const I32x8 even = LLMSERVE_SHUFFLE(q[2 * i], q[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14);
    const I32x8 odd = LLMSERVE_SHUFFLE(q[2 * i], q[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15);
    store(chunk.quants[g] + 8 * i, __builtin_convertvector(even, I16x8));
    store(chunk.quants[g] + kGroup / 2 + 8 * i, __builtin_convertvector(odd, I16x8));
    chunk.sums[g][i] = horizontal_sum(q[2 * i] + q[2 * i + 1]);
  }
  chunk.scale[g] = scale;
  chunk.scaled_sum[g] = scale * static_cast<float>(chunk.sums[g][0] + chunk.sums[g][1]);
}

inline void quantize(const float* x, int64_t num_cols, float max_quant, int64_t chunk_tokens,
                     int64_t begin, int64_t end, ActivationChunk* chunks) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < num_cols; c += kGroup) {
      quantize_group(x + t * num_cols + c, max_quant, chunks[c / kChunk * chunk_tokens + t],
                     static_cast<int>(c % kChunk / kGroup));
    }
  }
}

// Adds a group to the totals of the rows of a tile. `sums` are the exact sums of
// sub * (quant - kOffset) * activation, of the halves for formats with subscales, else of the whole
// group.
template <class Format, int kRows, typename Chunk, typename Floats, typename Ints>
LLMSERVE_INLINE Floats add_group(const TileScales<kRows>& tile, int g, const Chunk& chunk,
                                 const Ints* sums, Floats total) {
  const auto scale = load<Floats>(tile.scale[g]) * splat<Floats>(chunk.scale[g]);
  for (int half = 0; half < (Format::kHasSubscales ? 2 : 1); ++half) {
    total = Isa::fma(to_float(sums[half]), scale, total);
  }
  if constexpr (Format::kHasMin) {
    const auto min = load<Floats>(tile.min[g]);
    if constexpr (Format::kHasSubscales) {
      const Ints sum = load<Ints>(tile.sub_min[g][0]) * chunk.sums[g][0] +
                       load<Ints>(tile.sub_min[g][1]) * chunk.sums[g][1];
      total = Isa::fma(to_float(sum), min * splat<Floats>(chunk.scale[g]), total);
    } else {
      total = Isa::fma(min, splat<Floats>(chunk.scaled_sum[g]), total);
    }
  }
  return total;
}

// Adds a group of a tile to the totals of kTokens tokens. pairs_of(q, pairs) gives the pairs of a
// quad: its even columns, then its odd ones.
template <class Format, int kTokens, typename PairsOf>
LLMSERVE_INLINE void add_tile_group(const TileScales<kTileRows>& scales, int g,
                                    const ActivationChunk* chunks, PairsOf pairs_of,
                                    V total[kTokens]) {
  constexpr int kHalves = Format::kHasSubscales ? 2 : 1;
  Isa::Ints sums[kTokens][kHalves];
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    Isa::Ints dots[kTokens] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kQuads / kHalves; ++i) {
      const int q = half * (kQuads / kHalves) + i;
      Isa::Shorts pairs[2];
      pairs_of(q, pairs);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const int16_t* x = chunks[t].quants[g] + odd * (kGroup / 2) + 2 * q;
          dots[t] = Isa::add_pairs(dots[t], pairs[odd], load<int32_t>(x));
        }
      }
    }
    for (int t = 0; t < kTokens; ++t) sums[t][half] = dots[t];
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    total[t] = add_group<Format>(scales, g, chunks[t], sums[t], total[t]);
  }
}

template <class Format, int kTokens>
LLMSERVE_INLINE void multiply_chunk(const Tile<kTileRows>& tile, int num_groups,
                                    const ActivationChunk* chunks, float (*out)[kTileRows]) {
  V total[kTokens];
  for (int t = 0; t < kTokens; ++t) total[t] = load<V>(out[t]);
  for (int g = 0; g < num_groups; ++g) {
    add_tile_group<Format, kTokens>(
        tile.scales, g, chunks,
        [&](int q, Isa::Shorts pairs[2]) {
          pairs[0] = load<Isa::Shorts>(tile.quants[g][2 * q]);
          pairs[1] = load<Isa::Shorts>(tile.quants[g][2 * q + 1]);
        },
        total);
  }
  for (int t = 0; t < kTokens; ++t) store(out[t], total[t]);
}

// Adds a group of eight rows, as they are stored, to their totals.
template <class Format, int kTokens>
LLMSERVE_INLINE void add_stored_group(const uint8_t* const rows[kUnpackedRows], int g,
                                      const TileScales<kUnpackedRows>& scales,
                                      const ActivationChunk* chunks, F32x8 total[kTokens]) {
  for (int t = 0; t < kTokens; ++t) {
    I32x8 parts[kUnpackedRows], sums[2];
#pragma GCC unroll 8
    for (int r = 0; r < kUnpackedRows; ++r) {
      parts[r] = Isa::row_dot(Format::template quants<Isa>(rows[r], g), chunks[t].quants[g]);
    }
    Isa::sum_halves(parts, sums);
    const int32_t* x_sums = chunks[t].sums[g];
    if constexpr (Format::kHasSubscales) {
      for (int half = 0; half < 2; ++half) {
        sums[half] -= broadcast(Format::kOffset * x_sums[half]);
        sums[half] *= load<I32x8>(scales.sub[g][half]);
      }
    } else {
      sums[0] += sums[1] - broadcast(Format::kOffset * (x_sums[0] + x_sums[1]));
    }
    total[t] = add_group<Format>(scales, g, chunks[t], sums, total[t]);
  }
}

LLMSERVE_INLINE int groups_left(int64_t num_groups, int64_t g) {
  return static_cast<int>(num_groups - g < kGroupsInChunk ? num_groups - g : kGroupsInChunk);
}

// Multiplies tiles of rows [begin, end) with all tokens. unpack(row) gives a function that unpacks
// the next chunk of so many groups of the tile that begins with `row`.
template <class Format, typename Unpack>
LLMSERVE_INLINE void multiply_tiles(const LinearArgs& args, int64_t begin, int64_t end,
                                    Unpack unpack) {
  const int64_t num_groups = args.weight.num_cols / kGroup;
  Tile<kTileRows> tile;
  alignas(64) float total[kTokenBlock][kTileRows];
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t row = begin; row < end; row += kTileRows) {
      auto unpack_chunk = unpack(row);
      for (int t = 0; t < num_tokens; ++t) store(total[t], V{});
      for (int64_t g = 0; g < num_groups; g += kGroupsInChunk) {
        const int groups = groups_left(num_groups, g);
        unpack_chunk(groups, tile);
        const ActivationChunk* chunks =
            args.chunks + g / kGroupsInChunk * padded_tokens(args.num_tokens) + first;
        for_token_groups<Isa::kMaxTokens>(num_tokens, [&](auto tokens, int t) {
          multiply_chunk<Format, decltype(tokens)::value>(tile, groups, chunks + t, total + t);
        });
      }
      store_rows<kTileRows, V>(args, row, first, num_tokens, total);
    }
  }
}

template <class Format>
void multiply_many(const LinearArgs& args, int64_t row_bytes, int64_t begin, int64_t end) {
  multiply_tiles<Format>(args, begin, end, [&](int64_t row) {
    struct Rows {
      const uint8_t* rows[kTileRows];
      int64_t row_bytes;
      LLMSERVE_INLINE void operator()(int num_groups, Tile<kTileRows>& tile) {
        unpack_tile<Format, Isa>(rows, num_groups, tile);
        for (int r = 0; r < kTileRows; ++r) {
          prefetch_range(rows[r] + kPrefetchRows * row_bytes, kChunkBytes<Format>);
          rows[r] += kChunkBytes<Format>;
        }
      }
    };
    Rows unpack;
    unpack.row_bytes = row_bytes;
    find_rows<kTileRows>(args.weight, row_bytes, row, unpack.rows);
    return unpack;
  });
}

template <class Format>
LLMSERVE_INLINE const uint8_t* packed_tile(const Matrix& weight, int64_t row) {
  return weight.data + row / kPackedRows * Packed<Format>::tile_bytes(weight.num_cols);
}

template <class Format>
void multiply_packed_many(const LinearArgs& args, int64_t begin, int64_t end) {
  multiply_tiles<Format>(args, begin, end, [&](int64_t row) {
    struct Rows {
      const uint8_t* chunk;
      int lane;
      LLMSERVE_INLINE void operator()(int num_groups, Tile<kTileRows>& tile) {
        const int64_t num_bytes = Packed<Format>::chunk_bytes(num_groups);
        prefetch_range(chunk + kPrefetchBytes, static_cast<int>(num_bytes));
        unpack_packed_tile<Format, Isa>(chunk, num_groups, lane, tile);
        chunk += num_bytes;
      }
    };
    return Rows{packed_tile<Format>(args.weight, row), static_cast<int>(row % kPackedRows)};
  });
}

// As multiply_packed_many, for the few tokens whose sums fit into registers: quads are multiplied
// as they come, with no tile in between.
template <class Format, int kTokens>
void multiply_packed_few(const LinearArgs& args, int64_t begin, int64_t end) {
  using Layout = Packed<Format>;
  const int64_t num_all_groups = args.weight.num_cols / kGroup;
  TileScales<kTileRows> scales;
  // The hardware would take a while to notice that a new stream begins.
  prefetch_range(packed_tile<Format>(args.weight, begin), kPrefetchBytes);
  const uint8_t* const last = packed_tile<Format>(args.weight, end + kPackedRows - 1);
  for (int64_t row = begin; row < end; row += kTileRows) {
    const uint8_t* chunk = packed_tile<Format>(args.weight, row);
    const int lane = static_cast<int>(row % kPackedRows);
    const ActivationChunk* chunks = args.chunks;
    V total[kTokens] = {};
    for (int64_t first = 0; first < num_all_groups; first += kGroupsInChunk) {
      const int num_groups = groups_left(num_all_groups, first);
      const int64_t num_bytes = Layout::chunk_bytes(num_groups);
      unpack_packed_scales<Format, Isa>(chunk, num_groups, lane, scales);
      for (int g = 0; g < num_groups; ++g) {
        const uint8_t* planes =
            chunk + Layout::kChunkHeader + g * Layout::kGroupBytes + Layout::kGroupHeader;
        prefetch_ahead(planes, Layout::kGroupBytes, last);
        add_tile_group<Format, kTokens>(
            scales, g, chunks,
            [&](int q, Isa::Shorts pairs[2]) {
              const auto quad = packed_quad<Format, Isa>(planes, q, lane);
              split_quad<Format, Isa>(scales, g, q, (Isa::Shorts)quad, pairs);
            },
            total);
      }
      chunk += num_bytes;
      chunks += kTokens;
    }
    alignas(64) float sums[kTokens][kTileRows];
    for (int t = 0; t < kTokens; ++t) store(sums[t], total[t]);
    store_rows<kTileRows, V>(args, row, 0, static_cast<int>(args.num_tokens), sums);
  }
}

template <class Format>
void multiply_packed(const LinearArgs& args, int64_t begin, int64_t end) {
  if constexpr (Isa::kHasFewTokenKernels) {
    switch (padded_tokens(args.num_tokens)) {
      case 1:
        return multiply_packed_few<Format, 1>(args, begin, end);
      case 2:
        return multiply_packed_few<Format, 2>(args, begin, end);
      case 4:
        return multiply_packed_few<Format, 4>(args, begin, end);
      case 6:
        return multiply_packed_few<Format, 6>(args, begin, end);
      case 8:
        return multiply_packed_few<Format, 8>(args, begin, end);
    }
  }
  multiply_packed_many<Format>(args, begin, end);
}

// As multiply_many, for few tokens: unpacking a tile would cost more than it saves.
template <class Format, int kTokens>
void multiply_few(const LinearArgs& args, int64_t row_bytes, int64_t begin, int64_t end) {
  const int64_t num_all_groups = args.weight.num_cols / kGroup;
  TileScales<kUnpackedRows> scales;
  for (int64_t row = begin; row < end; row += kUnpackedRows) {
    const uint8_t* rows[kUnpackedRows];
    find_rows<kUnpackedRows>(args.weight, row_bytes, row, rows);
    F32x8 total[kTokens] = {};
    const ActivationChunk* chunks = args.chunks;
    for (int64_t first = 0; first < num_all_groups; first += kGroupsInChunk) {
      const int num_groups =
          Format::kGroupsInBlock > 1 ? kGroupsInChunk : groups_left(num_all_groups, first);
      unpack_scales<Format, Isa>(rows, num_groups, scales, 0);
#pragma GCC unroll 8
      for (int g = 0; g < kGroupsInChunk; ++g) {
        if (g >= num_groups) break;
        add_stored_group<Format, kTokens>(rows, g, scales, chunks, total);
      }
      for (int r = 0; r < kUnpackedRows; ++r) {
        prefetch_range(rows[r] + kPrefetchRows * row_bytes, kChunkBytes<Format>);
        rows[r] += kChunkBytes<Format>;
      }
      chunks += kTokens;
    }
    alignas(32) float sums[kTokens][kUnpackedRows];
    for (int t = 0; t < kTokens; ++t) store(sums[t], total[t]);
    store_rows<kUnpackedRows, F32x8>(args, row, 0, kTokens, sums);
  }
}

// Rows [begin, end), where begin is a multiple of kTileRows.
template <class Format>
void multiply_quantized(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.weight.type & kPacked) return multiply_packed<Format>(args, begin, end);
  const int64_t row_bytes =
      args.weight.num_cols / kGroup / Format::kGroupsInBlock * Format::kBlockBytes;
  if (args.num_tokens == 1) return multiply_few<Format, 1>(args, row_bytes, begin, end);
  if (args.num_tokens == 2) return multiply_few<Format, 2>(args, row_bytes, begin, end);
  multiply_many<Format>(args, row_bytes, begin, end);
}

// A group of a row as float32. Lane `lane` of group g of `scales` has what belongs to it.
template <class Format, int kRows>
LLMSERVE_INLINE void dequantize_group(const uint8_t quants[kGroup], const TileScales<kRows>& scales,
                                      int g, int lane, float* out) {
  for (int i = 0; i < kGroup; ++i) {
    const int half = i / (kGroup / 2);
    float scale = scales.scale[g][lane];
    float min = Format::kHasMin ? scales.min[g][lane] : 0.0f;
    if constexpr (Format::kHasSubscales) {
      scale *= static_cast<float>(scales.sub[g][half][lane]);
      if constexpr (Format::kHasMin) min *= static_cast<float>(scales.sub_min[g][half][lane]);
    }
    const float value = scale * static_cast<float>(quants[i] - Format::kOffset);
    out[i] = Format::kHasMin ? value + min : value;
  }
}

template <class Format>
void dequantize_stored_row(const uint8_t* row, int64_t num_cols, float* out) {
  TileScales<kUnpackedRows> scales;
  const uint8_t* rows[kUnpackedRows];
  for (int64_t g = 0; g < num_cols / kGroup; g += kGroupsInChunk, row += kChunkBytes<Format>) {
    const int num_groups = groups_left(num_cols / kGroup, g);
    for (auto& same : rows) same = row;
    unpack_scales<Format, Isa>(rows, num_groups, scales, 0);
    for (int i = 0; i < num_groups; ++i) {
      uint8_t quants[kGroup];
      store(quants, Format::template quants<Isa>(row, i));
      dequantize_group<Format>(quants, scales, i, 0, out + (g + i) * kGroup);
    }
  }
}

template <class Format>
void dequantize_packed_row(const Matrix& weight, int64_t row, float* out) {
  using Layout = Packed<Format>;
  const int lane = static_cast<int>(row % kPackedRows);
  const uint8_t* chunk = packed_tile<Format>(weight, row);
  TileScales<kPackedRows> scales;
  for (int64_t g = 0; g < weight.num_cols / kGroup; g += kGroupsInChunk) {
    const int num_groups = groups_left(weight.num_cols / kGroup, g);
    unpack_packed_scales<Format, Isa>(chunk, num_groups, 0, scales);
    for (int i = 0; i < num_groups; ++i) {
      const uint8_t* planes =
          chunk + Layout::kChunkHeader + i * Layout::kGroupBytes + Layout::kGroupHeader;
      uint8_t quants[kGroup];
      for (int c = 0; c < kGroup; ++c) {
        quants[c] = static_cast<uint8_t>(packed_quant<Format>(planes, lane, c));
      }
      dequantize_group<Format>(quants, scales, i, lane, out + (g + i) * kGroup);
    }
    chunk += Layout::chunk_bytes(num_groups);
  }
}

template <class Format>
void dequantize_quantized_row(const Matrix& weight, int64_t row, float* out) {
  if (weight.type & kPacked) return dequantize_packed_row<Format>(weight, row, out);
  const int64_t row_bytes =
      weight.num_cols / kGroup / Format::kGroupsInBlock * Format::kBlockBytes;
  dequantize_stored_row<Format>(weight.data + row * row_bytes, weight.num_cols, out);
}

}  // namespace
}  // namespace llmserve
