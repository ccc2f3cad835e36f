// The kernels of linear.h over a struct `Isa` that the including file defines before.
//
// Isa gives: kMaxTokens (tokens in flight); from_half, widen_bytes, widen_halves, narrow
// (conversions); fma(a, b, c); pair_dot(a, b), which multiplies pairs of int16 and adds both
// products; encode_subscale, for what group_dots reads from Tile::sub; kKeepsOffset<Format>, false
// where group_dots takes the offset out itself; group_dots<Format, kTokens>(tile, g, chunks, plane,
// sums), the exact sums over a group of sub * quant * activation of one plane of the activations;
// row_dot(quants, wide), whose lanes add up to a group's sum for one row; sum_rows, which adds the
// lanes of eight of them.
//
// Whatever the number of tokens, each output is the same chain of float operations.
#pragma once

#include "llmserve/linear_tile.h"

namespace llmserve {
namespace {

constexpr int kTokenBlock = 64;  // tokens for which an unpacked tile is used
constexpr int kFewTokens = 2;    // up to here rows are multiplied as they are stored
constexpr int kPrefetchTiles = 4;  // how far ahead rows are fetched into the second-level cache
constexpr int kFloatChunk = 128;  // columns of an unpacked tile of float weights

// Stores a plane of a group and returns the sum of its quants.
LLMSERVE_INLINE int32_t store_plane(const I32x8 q[4], ActivationChunk& chunk, int plane, int g) {
  const int32_t first = horizontal_sum(q[0] + q[1]);
  const int32_t second = horizontal_sum(q[2] + q[3]);
  store(chunk.quants[plane][g], Isa::narrow(q));
  chunk.sums[plane][g][0] = static_cast<int16_t>(first);
  chunk.sums[plane][g][1] = static_cast<int16_t>(second);
  return first + second;
}

LLMSERVE_INLINE void quantize_group(const float* x, ActivationChunk& chunk, int g) {
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
  const float inverse = max_abs > 1e-35f ? 127.0f / max_abs : 0.0f;
  const float scale = max_abs / 127.0f;
  // 1.5 * 2^23 has a last place of 1: adding it rounds to an integer, ties to even.
  constexpr float kRounder = 0x1.8p23f;
  constexpr int32_t kRounderBits = 0x4b400000;
  I32x8 coarse[4], fine[4];
  for (int i = 0; i < 4; ++i) {
    const F32x8 steps = v[i] * broadcast(inverse);
    const F32x8 shifted = steps + kRounder;
    // What the coarse plane leaves is at most half a step: 127 steps of the fine plane.
    const F32x8 rest = steps - (shifted - kRounder);
    const F32x8 shifted_rest = rest * 254.0f + kRounder;
    coarse[i] = inverse == 0.0f ? I32x8{} : (I32x8)shifted - kRounderBits;
    fine[i] = inverse == 0.0f ? I32x8{} : (I32x8)shifted_rest - kRounderBits;
  }
  const int32_t coarse_sum = store_plane(coarse, chunk, 0, g);
  const int32_t fine_sum = store_plane(fine, chunk, 1, g);
  const float fine_scale = scale / 254.0f;
  for (int i = 0; i < 4; ++i) {
    constexpr int kPlace[4] = {0, 2, 1, 3};
    const I32x8 wide = coarse[i] * 254 + fine[i];
    store(chunk.wide[g] + 8 * kPlace[i], __builtin_convertvector(wide, I16x8));
  }
  chunk.wide_sum[g] = 254 * coarse_sum + fine_sum;
  chunk.scale[0][g] = scale;
  chunk.scale[1][g] = fine_scale;
  chunk.scaled_sum[g] = fine_scale * static_cast<float>(chunk.wide_sum[g]);
}

inline void quantize(const float* x, int64_t num_cols, int64_t num_tokens, int64_t begin,
                     int64_t end, ActivationChunk* chunks) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < num_cols; c += kGroup) {
      quantize_group(x + t * num_cols + c, chunks[c / kChunk * num_tokens + t],
                     static_cast<int>(c % kChunk / kGroup));
    }
  }
}

// Adds a group's exact sum (of quant * wide activation) to the totals, for formats without
// subscales.
template <class Format>
LLMSERVE_INLINE F32x8 add_group(const Tile& tile, int g, const ActivationChunk& chunk, I32x8 sum,
                                F32x8 total) {
  total = Isa::fma(to_float(sum), tile.scale[g] * broadcast(chunk.scale[1][g]), total);
  if constexpr (Format::kHasMin) {
    total = Isa::fma(tile.min[g], broadcast(chunk.scaled_sum[g]), total);
  }
  return total;
}

// The same for one plane of formats with subscales, whose sums of both planes exceed 32 bits.
template <class Format>
LLMSERVE_INLINE F32x8 add_plane(const Tile& tile, int g, const ActivationChunk& chunk, int plane,
                                I32x8 sum, F32x8 total) {
  const I32x8 correction =
      Isa::pair_dot(tile.correction[g], broadcast(load<int32_t>(chunk.sums[plane][g])));
  if constexpr (Isa::template kKeepsOffset<Format> && Format::kOffset != 0) sum += correction;
  const F32x8 scale = broadcast(chunk.scale[plane][g]);
  total = Isa::fma(to_float(sum), tile.scale[g] * scale, total);
  if constexpr (Format::kHasMin) {
    total = Isa::fma(to_float(correction), tile.min[g] * scale, total);
  }
  return total;
}

template <class Format, int kTokens>
LLMSERVE_INLINE void multiply_chunk(const Tile& tile, int num_groups, const ActivationChunk* chunks,
                                    F32x8* out) {
  F32x8 total[kTokens];
  for (int t = 0; t < kTokens; ++t) total[t] = out[t];
  for (int g = 0; g < num_groups; ++g) {
    I32x8 coarse[kTokens], fine[kTokens];
    Isa::template group_dots<Format, kTokens>(tile, g, chunks, 0, coarse);
    Isa::template group_dots<Format, kTokens>(tile, g, chunks, 1, fine);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      if constexpr (Format::kHasSubscales) {
        total[t] = add_plane<Format>(tile, g, chunks[t], 0, coarse[t], total[t]);
        total[t] = add_plane<Format>(tile, g, chunks[t], 1, fine[t], total[t]);
      } else {
        I32x8 sum = coarse[t] * 254 + fine[t];
        if constexpr (Isa::template kKeepsOffset<Format> && Format::kOffset != 0) {
          sum += broadcast(-Format::kOffset * chunks[t].wide_sum[g]);
        }
        total[t] = add_group<Format>(tile, g, chunks[t], sum, total[t]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) out[t] = total[t];
}

// As multiply_chunk, for few tokens: unpacking a tile would cost more than it saves.
template <class Format>
LLMSERVE_INLINE void multiply_rows(const uint8_t* const rows[kTileRows], const Tile& tile,
                                   int num_groups, const ActivationChunk* chunks, int num_tokens,
                                   F32x8* total) {
  if constexpr (Format::kGroupsInBlock > 1) num_groups = kGroupsInChunk;
#pragma GCC unroll 8
  for (int g = 0; g < num_groups; ++g) {
    for (int t = 0; t < num_tokens; ++t) {
      I32x8 parts[kTileRows];
#pragma GCC unroll 8
      for (int r = 0; r < kTileRows; ++r) {
        parts[r] = Isa::row_dot(Format::quants(rows[r], g), chunks[t].wide[g]);
      }
      I32x8 sum = Isa::sum_rows(parts);
      if constexpr (Format::kOffset != 0) {
        sum += broadcast(-Format::kOffset * chunks[t].wide_sum[g]);
      }
      total[t] = add_group<Format>(tile, g, chunks[t], sum, total[t]);
    }
  }
}

// Calls f with as many tokens at once as there are left, as a constant: 8, 4, 2 or 1.
template <int kTokens, typename F>
LLMSERVE_INLINE void for_token_groups(int num_tokens, F f, int first = 0) {
  while (num_tokens - first >= kTokens) {
    f(std::integral_constant<int, kTokens>{}, first);
    first += kTokens;
  }
  if constexpr (kTokens > 1) for_token_groups<kTokens / 2>(num_tokens, f, first);
}

// Rows of a tile; at the end of the matrix its last row stands in for those that are missing.
LLMSERVE_INLINE void tile_rows(const Matrix& weight, int64_t row_bytes, int64_t tile,
                               const uint8_t* rows[kTileRows]) {
  for (int r = 0; r < kTileRows; ++r) {
    const int64_t row = tile * kTileRows + r;
    rows[r] = weight.data + (row < weight.num_rows ? row : weight.num_rows - 1) * row_bytes;
  }
}

LLMSERVE_INLINE void store_tile(const LinearArgs& args, int64_t tile, int64_t first_token,
                                int num_tokens, const F32x8* total) {
  const int64_t row = tile * kTileRows;
  const int64_t num_rows = args.weight.num_rows;
  for (int t = 0; t < num_tokens; ++t) {
    float* out = args.out + (first_token + t) * num_rows + row;
    if (row + kTileRows <= num_rows) {
      store(out, args.bias ? total[t] + load<F32x8>(args.bias + row) : total[t]);
      continue;
    }
    for (int64_t r = 0; r < num_rows - row; ++r) {
      out[r] = args.bias ? total[t][r] + args.bias[row + r] : total[t][r];
    }
  }
}

LLMSERVE_INLINE void prefetch_range(const uint8_t* begin, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(begin + i, 0, 2);
}

template <class Format>
void multiply_quantized(const LinearArgs& args, int64_t tile_begin, int64_t tile_end) {
  constexpr int kChunkBytes = kGroupsInChunk / Format::kGroupsInBlock * Format::kBlockBytes;
  const int64_t num_groups = args.weight.num_cols / kGroup;
  const int64_t row_bytes = num_groups / Format::kGroupsInBlock * Format::kBlockBytes;
  Tile tile;
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t n = tile_begin; n < tile_end; ++n) {
      const uint8_t* rows[kTileRows];
      tile_rows(args.weight, row_bytes, n, rows);
      F32x8 total[kTokenBlock];
      for (int t = 0; t < num_tokens; ++t) total[t] = F32x8{};
      for (int64_t g = 0; g < num_groups; g += kGroupsInChunk) {
        const int groups =
            static_cast<int>(num_groups - g < kGroupsInChunk ? num_groups - g : kGroupsInChunk);
        for (int r = 0; r < kTileRows; ++r) {
          prefetch_range(rows[r] + kPrefetchTiles * kTileRows * row_bytes, kChunkBytes);
        }
        const ActivationChunk* chunks =
            args.chunks + g / kGroupsInChunk * args.num_tokens + first;
        if constexpr (!Format::kHasSubscales) {
          if (args.num_tokens <= kFewTokens) {
            unpack_scales<Format, Isa>(rows, groups, tile);
            multiply_rows<Format>(rows, tile, groups, chunks, num_tokens, total);
            for (int r = 0; r < kTileRows; ++r) rows[r] += kChunkBytes;
            continue;
          }
        }
        unpack_tile<Format, Isa>(rows, groups, tile);
        for_token_groups<Isa::kMaxTokens>(num_tokens, [&](auto tokens, int t) {
          multiply_chunk<Format, decltype(tokens)::value>(tile, groups, chunks + t, total + t);
        });
        for (int r = 0; r < kTileRows; ++r) rows[r] += kChunkBytes;
      }
      store_tile(args, n, first, num_tokens, total);
    }
  }
}

struct Float32 {
  static constexpr int kBytes = 4;
  static LLMSERVE_INLINE F32x8 load8(const uint8_t* p) { return load<F32x8>(p); }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static LLMSERVE_INLINE F32x8 load8(const uint8_t* p) { return Isa::from_half(load<U16x8>(p)); }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static LLMSERVE_INLINE F32x8 load8(const uint8_t* p) {
    return (F32x8)(Isa::widen_halves(load<U16x8>(p)) << 16);
  }
};

// Loads up to 8 values; what is missing is 0.
template <class Format>
LLMSERVE_INLINE F32x8 load_some(const uint8_t* p, int64_t count) {
  if (count >= 8) return Format::load8(p);
  alignas(32) uint8_t buffer[32] = {};
  __builtin_memcpy(buffer, p, static_cast<size_t>(count) * Format::kBytes);
  return Format::load8(buffer);
}

// Adds kGroups groups of 32 columns (the last may be shorter) for kTokens tokens. tile[c] has column
// c of eight rows. Groups are summed apart: that is more exact than one long chain, and the chains
// of several groups can run beside one another.
template <int kTokens, int kGroups>
LLMSERVE_INLINE void add_float_groups(const F32x8* tile, int group_cols, const float* x,
                                      int64_t stride, F32x8* out) {
  F32x8 sums[kGroups][kTokens] = {};
  for (int c = 0; c < group_cols; ++c) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const int col = g * kGroup + c;
        sums[g][t] = Isa::fma(tile[col], broadcast(x[t * stride + col]), sums[g][t]);
      }
    }
  }
  for (int g = 0; g < kGroups; ++g) {
    for (int t = 0; t < kTokens; ++t) out[t] += sums[g][t];
  }
}

template <int kTokens>
LLMSERVE_INLINE void multiply_float_chunk(const F32x8* tile, int num_cols, const float* x,
                                          int64_t stride, F32x8* out) {
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
void multiply_float(const LinearArgs& args, int64_t tile_begin, int64_t tile_end) {
  const int64_t num_cols = args.weight.num_cols;
  const int64_t row_bytes = num_cols * Format::kBytes;
  const int64_t lead = kPrefetchTiles * kTileRows * row_bytes;
  F32x8 tile[kFloatChunk];
  for (int64_t first = 0; first < args.num_tokens; first += kTokenBlock) {
    const int64_t left = args.num_tokens - first;
    const int num_tokens = static_cast<int>(left < kTokenBlock ? left : kTokenBlock);
    for (int64_t n = tile_begin; n < tile_end; ++n) {
      const uint8_t* rows[kTileRows];
      tile_rows(args.weight, row_bytes, n, rows);
      F32x8 total[kTokenBlock];
      for (int t = 0; t < num_tokens; ++t) total[t] = F32x8{};
      for (int64_t begin = 0; begin < num_cols; begin += kFloatChunk) {
        const int cols =
            static_cast<int>(num_cols - begin < kFloatChunk ? num_cols - begin : kFloatChunk);
        for (int c = 0; c < cols; c += 8) {
          F32x8 block[8];
          for (int r = 0; r < kTileRows; ++r) {
            const uint8_t* p = rows[r] + (begin + c) * Format::kBytes;
            if (c % (64 / Format::kBytes) == 0) prefetch_range(p + lead, 64);
            block[r] = load_some<Format>(p, cols - c);
          }
          transpose_floats(block);
          for (int i = 0; i < 8; ++i) tile[c + i] = block[i];
        }
        const float* x = args.x + first * num_cols + begin;
        for_token_groups<8>(num_tokens, [&](auto tokens, int t) {
          multiply_float_chunk<decltype(tokens)::value>(tile, cols, x + t * num_cols, num_cols,
                                                        total + t);
        });
      }
      store_tile(args, n, first, num_tokens, total);
    }
  }
}

template <class Format>
void dequantize_quantized_row(const uint8_t* row, int64_t num_cols, float* out) {
  constexpr int kChunkBytes = kGroupsInChunk / Format::kGroupsInBlock * Format::kBlockBytes;
  for (int64_t begin = 0; begin < num_cols; begin += kChunk, row += kChunkBytes) {
    const int64_t left = (num_cols - begin) / kGroup;
    const int num_groups = static_cast<int>(left < kGroupsInChunk ? left : kGroupsInChunk);
    const RowScales s = Format::template scales<Isa>(row, num_groups);
    for (int g = 0; g < num_groups; ++g) {
      uint8_t quants[kGroup];
      store(quants, Format::quants(row, g));
      for (int i = 0; i < kGroup; ++i) {
        const int half = i / (kGroup / 2);
        float scale = s.scale[g], min = s.min[g];
        if constexpr (Format::kHasSubscales) scale *= static_cast<float>(s.sub[half][g]);
        if constexpr (Format::kHasSubscales) min *= static_cast<float>(s.sub_min[half][g]);
        const float value = scale * static_cast<float>(quants[i] - Format::kOffset);
        out[begin + g * kGroup + i] = Format::kHasMin ? value + min : value;
      }
    }
  }
}

template <class Format>
void dequantize_float_row(const uint8_t* row, int64_t num_cols, float* out) {
  for (int64_t c = 0; c < num_cols; c += 8) {
    const F32x8 values = load_some<Format>(row + c * Format::kBytes, num_cols - c);
    const int64_t count = num_cols - c < 8 ? num_cols - c : 8;
    __builtin_memcpy(out + c, &values, static_cast<size_t>(count) * sizeof(float));
  }
}

// Calls f.quantized<Format>() or f.floating<Format>() for the number of a ggml type.
template <typename F>
LLMSERVE_INLINE void dispatch(int type, F f) {
  switch (type) {
    case 0:
      return f.template floating<Float32>();
    case 1:
      return f.template floating<Float16>();
    case 30:
      return f.template floating<BFloat16>();
    case 2:
      return f.template quantized<Q4_0>();
    case 3:
      return f.template quantized<Q4_1>();
    case 6:
      return f.template quantized<Q5_0>();
    case 7:
      return f.template quantized<Q5_1>();
    case 8:
      return f.template quantized<Q8_0>();
    case 10:
      return f.template quantized<Q2_K>();
    case 11:
      return f.template quantized<Q3_K>();
    case 12:
      return f.template quantized<Q4_K>();
    case 13:
      return f.template quantized<Q5_K>();
    case 14:
      return f.template quantized<Q6_K>();
  }
}

struct Multiply {
  const LinearArgs& args;
  int64_t begin, end;
  template <class Format>
  void quantized() const {
    multiply_quantized<Format>(args, begin, end);
  }
  template <class Format>
  void floating() const {
    multiply_float<Format>(args, begin, end);
  }
};

struct DequantizeRow {
  const uint8_t* row;
  int64_t num_cols;
  float* out;
  template <class Format>
  void quantized() const {
    dequantize_quantized_row<Format>(row, num_cols, out);
  }
  template <class Format>
  void floating() const {
    dequantize_float_row<Format>(row, num_cols, out);
  }
};

inline void multiply(const LinearArgs& args, int64_t begin, int64_t end) {
  dispatch(args.weight.type, Multiply{args, begin, end});
}

inline void dequantize_row(const uint8_t* row, int type, int64_t num_cols, float* out) {
  dispatch(type, DequantizeRow{row, num_cols, out});
}

}  // namespace
}  // namespace llmserve
