// Tiles of weight rows, unpacked into the order in which the products need them.
#pragma once

#include "llmserve/ggml_formats.h"
#include "llmserve/linear.h"

namespace llmserve {
namespace {

constexpr int kPairs = kGroup / 2;
constexpr int kUnpackedRows = 8;  // rows that are unpacked together

// The place of the i-th pair of a half of a group, or of the whole group if it is not halved.
template <int kHalves>
constexpr int pair_of_half(int half, int i) {
  if (kHalves == 1) return i;
  return i < kPairs / 4 ? half * kPairs / 4 + i : kPairs / 2 + half * kPairs / 4 + i - kPairs / 4;
}

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
  // sub * (quant - kOffset). The pairs of even columns of a group, then those of the odd ones, as
  // in ActivationChunk.
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

template <class Format, class Isa>
LLMSERVE_INLINE void unpack_tile(const uint8_t* const rows[Isa::kTileRows], int num_groups,
                                 Tile<Isa::kTileRows>& tile) {
  using Ints = typename Isa::Ints;
  using Shorts = typename Isa::Shorts;
  if constexpr (Format::kGroupsInBlock > 1) num_groups = kGroupsInChunk;
  for (int r = 0; r < Isa::kTileRows; r += kUnpackedRows) {
    unpack_scales<Format, Isa>(rows + r, num_groups, tile.scales, r);
  }
  constexpr auto kOffset = static_cast<uint16_t>(Format::kOffset);
#pragma GCC unroll 8
  for (int g = 0; g < num_groups; ++g) {
    U8x32 quants[Isa::kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < Isa::kTileRows; ++r) {
      quants[r] = Format::template quants<Isa>(rows[r], g);
    }
    Ints quads[kGroup / 4];
    Isa::transpose_quads(quants, quads);
#pragma GCC unroll 8
    for (int q = 0; q < kGroup / 4; ++q) {
      Shorts even = (Shorts)(quads[q] & 0x00ff00ff) - kOffset;
      Shorts odd = ((Shorts)quads[q] >> 8) - kOffset;
      if constexpr (Format::kHasSubscales) {
        const auto sub = load<Ints>(tile.scales.sub[g][q / 4]);
        const auto pairs = (Shorts)((sub & 0xffff) | sub << 16);
        even *= pairs;
        odd *= pairs;
      }
      store(tile.quants[g][q], even);
      store(tile.quants[g][kPairs / 2 + q], odd);
    }
  }
}

}  // namespace
}  // namespace llmserve
