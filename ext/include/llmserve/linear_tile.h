// Tiles of weight rows, unpacked into the order in which the products need them.
#pragma once

#include "llmserve/packed_tiles.h"

namespace llmserve {
namespace {

constexpr int kPairs = kGroup / 2;
constexpr int kUnpackedRows = 8;  // rows that are unpacked together

// Of a chunk of kRows rows: vectors have one lane per row.
template <int kRows>
struct TileScales {
  alignas(64) float scale[kGroupsInChunk][kRows];
  alignas(64) float min[kGroupsInChunk][kRows];
  alignas(64) int32_t sub[kGroupsInChunk][2][kRows];
  alignas(64) int32_t sub_min[kGroupsInChunk][2][kRows];
};

template <int kRows>
struct Tile {
  TileScales<kRows> scales;
  // sub * (quant - kOffset). Of each quad the pair of even columns, then that of the odd ones.
  alignas(64) int16_t quants[kGroupsInChunk][kPairs][kRows][2];
};

LLMSERVE_INLINE void transpose_floats(F32x8 v[8]) {
  I32x8 bits[8];
  for (int i = 0; i < 8; ++i) bits[i] = (I32x8)v[i];
  transpose(bits);
  for (int i = 0; i < 8; ++i) v[i] = (F32x8)bits[i];
}

// `rows` point to the chunk in each row. They become rows `first` and following of the tile.
template <class Format, class Isa, int kRows>
LLMSERVE_INLINE void unpack_scales(const uint8_t* const rows[kUnpackedRows], int num_groups,
                                   TileScales<kRows>& tile, int first) {
  F32x8 scale[8], min[8];
  I32x8 sub[2][8], sub_min[2][8];
#pragma GCC unroll 8
  for (int r = 0; r < kUnpackedRows; ++r) {
    const RowScales s = Format::template scales<Isa>(rows[r], num_groups);
    scale[r] = s.scale;
    min[r] = s.min;
    for (int half = 0; half < 2; ++half) {
      sub[half][r] = s.sub[half];
      sub_min[half][r] = s.sub_min[half];
    }
  }
  transpose_floats(scale);
  if constexpr (Format::kHasMin) transpose_floats(min);
  for (int half = 0; Format::kHasSubscales && half < 2; ++half) {
    transpose(sub[half]);
    if constexpr (Format::kHasMin) transpose(sub_min[half]);
  }
  for (int g = 0; g < kGroupsInChunk; ++g) {
    store(tile.scale[g] + first, scale[g]);
    if constexpr (Format::kHasMin) store(tile.min[g] + first, min[g]);
    for (int half = 0; Format::kHasSubscales && half < 2; ++half) {
      store(tile.sub[g][half] + first, sub[half][g]);
      if constexpr (Format::kHasMin) store(tile.sub_min[g][half] + first, sub_min[half][g]);
    }
  }
}

// Quad q of group g, a byte each, as sub * (quant - kOffset): the even columns, the odd ones.
template <class Format, class Isa>
LLMSERVE_INLINE void split_quad(const TileScales<Isa::kTileRows>& scales, int g, int q,
                                typename Isa::Shorts quad, typename Isa::Shorts pairs[2]) {
  using Ints = typename Isa::Ints;
  using Shorts = typename Isa::Shorts;
  constexpr auto kOffset = static_cast<uint16_t>(Format::kOffset);
  pairs[0] = (quad & splat<Shorts>(uint16_t{0x00ff})) - kOffset;
  pairs[1] = (quad >> 8) - kOffset;
  if constexpr (Format::kHasSubscales) {
    const auto sub = load<Ints>(scales.sub[g][q / 4]);
    const auto subs = (Shorts)((sub & 0xffff) | sub << 16);
    pairs[0] *= subs;
    pairs[1] *= subs;
  }
}

template <class Format, class Isa>
LLMSERVE_INLINE void store_quad(Tile<Isa::kTileRows>& tile, int g, int q,
                                typename Isa::Shorts quad) {
  typename Isa::Shorts pairs[2];
  split_quad<Format, Isa>(tile.scales, g, q, quad, pairs);
  store(tile.quants[g][2 * q], pairs[0]);
  store(tile.quants[g][2 * q + 1], pairs[1]);
}

template <class Format, class Isa>
LLMSERVE_INLINE void unpack_tile(const uint8_t* const rows[Isa::kTileRows], int num_groups,
                                 Tile<Isa::kTileRows>& tile) {
  using Ints = typename Isa::Ints;
  if constexpr (Format::kGroupsInBlock > 1) num_groups = kGroupsInChunk;
  for (int r = 0; r < Isa::kTileRows; r += kUnpackedRows) {
    unpack_scales<Format, Isa>(rows + r, num_groups, tile.scales, r);
  }
#pragma GCC unroll 8
  for (int g = 0; g < num_groups; ++g) {
    U8x32 quants[Isa::kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < Isa::kTileRows; ++r) {
      quants[r] = Format::template quants<Isa>(rows[r], g);
    }
    Ints quads[kQuads];
    Isa::transpose_quads(quants, quads);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      store_quad<Format, Isa>(tile, g, q, (typename Isa::Shorts)quads[q]);
    }
  }
}

// The scales of kRows rows from `lane` on, of a packed chunk.
template <class Format, class Isa, int kRows>
LLMSERVE_INLINE void unpack_packed_scales(const uint8_t* chunk, int num_groups, int lane,
                                          TileScales<kRows>& tile) {
  using Layout = Packed<Format>;
  for (int r = 0; r < kRows; r += 8) {
    F32x8 block_scale = {}, block_min = {};
    if constexpr (Layout::kIsBlocked) {
      const uint8_t* halves = chunk + (lane + r) * sizeof(uint16_t);
      block_scale = Isa::from_half(load<U16x8>(halves));
      if constexpr (Format::kHasMin) {
        block_min = -Isa::from_half(load<U16x8>(halves + Layout::kHalves));
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < num_groups; ++g) {
      const uint8_t* header = chunk + Layout::kChunkHeader + g * Layout::kGroupBytes;
      F32x8 scale = block_scale, min = block_min;
      if constexpr (Format::kScaleKind == ScaleKind::kHalves) {
        const uint8_t* halves = header + (lane + r) * sizeof(uint16_t);
        scale = Isa::from_half(load<U16x8>(halves));
        if constexpr (Format::kHasMin) min = Isa::from_half(load<U16x8>(halves + Layout::kHalves));
      } else {
        const uint8_t* bytes = header + lane + r;
        const I32x8 first = Isa::widen_bytes(load<uint64_t>(bytes));
        const I32x8 second = Isa::widen_bytes(load<uint64_t>(bytes + kPackedRows));
        if constexpr (Format::kScaleKind == ScaleKind::kSixBits) {
          scale *= to_float(first);
          min *= to_float(second);
        } else if constexpr (Format::kScaleKind == ScaleKind::kSubscales) {
          store(tile.sub[g][0] + r, first << 24 >> 24);
          store(tile.sub[g][1] + r, second << 24 >> 24);
        } else {
          store(tile.sub[g][0] + r, first & 0x0f);
          store(tile.sub[g][1] + r, second & 0x0f);
          store(tile.sub_min[g][0] + r, first >> 4);
          store(tile.sub_min[g][1] + r, second >> 4);
        }
      }
      store(tile.scale[g] + r, scale);
      if constexpr (Format::kHasMin) store(tile.min[g] + r, min);
    }
  }
}

// As unpack_tile, from rows `lane` and following of a packed tile.
template <class Format, class Isa>
LLMSERVE_INLINE void unpack_packed_tile(const uint8_t* chunk, int num_groups, int lane,
                                        Tile<Isa::kTileRows>& tile) {
  using Layout = Packed<Format>;
  unpack_packed_scales<Format, Isa>(chunk, num_groups, lane, tile.scales);
  for (int g = 0; g < num_groups; ++g) {
    const uint8_t* group = chunk + Layout::kChunkHeader + g * Layout::kGroupBytes;
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      const auto quad = packed_quad<Format, Isa>(group + Layout::kGroupHeader, q, lane);
      store_quad<Format, Isa>(tile, g, q, (typename Isa::Shorts)quad);
    }
  }
}

}  // namespace
}  // namespace llmserve
