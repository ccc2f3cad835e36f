// Tiles of weight rows, unpacked into the order in which the products need them.
#pragma once

#include "llmserve/ggml_formats.h"
#include "llmserve/linear.h"

namespace llmserve {
namespace {

// A chunk of eight rows. Vectors have one lane per row.
struct Tile {
  // [group][quad of columns][row][column of the quad]
  alignas(32) uint8_t quants[kGroupsInChunk][kGroup / 4][kTileRows][4];
  F32x8 scale[kGroupsInChunk];
  F32x8 min[kGroupsInChunk];
  I32x8 sub[kGroupsInChunk][2];
  // Pairs of int16, to be multiplied with the two sums of the activations: -kOffset * sub of a
  // format with an offset, sub_min of one with a minimum. Only for formats with subscales.
  I32x8 correction[kGroupsInChunk];
};

LLMSERVE_INLINE I32x8 pack_pair(I32x8 first, I32x8 second) {
  return (first & 0xffff) | second << 16;
}

LLMSERVE_INLINE void transpose_floats(F32x8 v[8]) {
  I32x8 bits[8];
  for (int i = 0; i < 8; ++i) bits[i] = (I32x8)v[i];
  transpose(bits);
  for (int i = 0; i < 8; ++i) v[i] = (F32x8)bits[i];
}

template <class Format, class Isa>
LLMSERVE_INLINE void unpack_scales(const uint8_t* const rows[kTileRows], int num_groups,
                                   Tile& tile) {
  F32x8 scale[8], min[8];
  I32x8 first[8], second[8], correction[8];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
    const RowScales s = Format::template scales<Isa>(rows[r], num_groups);
    scale[r] = s.scale;
    if constexpr (Format::kHasMin) min[r] = s.min;
    if constexpr (Format::kHasSubscales) {
      first[r] = Isa::encode_subscale(s.sub[0]);
      second[r] = Isa::encode_subscale(s.sub[1]);
      correction[r] = Format::kHasMin
                          ? pack_pair(s.sub_min[0], s.sub_min[1])
                          : pack_pair(s.sub[0] * -Format::kOffset, s.sub[1] * -Format::kOffset);
    }
  }
  transpose_floats(scale);
  if constexpr (Format::kHasMin) transpose_floats(min);
  if constexpr (Format::kHasSubscales) {
    transpose(first);
    transpose(second);
    transpose(correction);
  }
  for (int g = 0; g < kGroupsInChunk; ++g) {
    tile.scale[g] = scale[g];
    if constexpr (Format::kHasMin) tile.min[g] = min[g];
    if constexpr (Format::kHasSubscales) {
      tile.sub[g][0] = first[g];
      tile.sub[g][1] = second[g];
      tile.correction[g] = correction[g];
    }
  }
}

// `rows` point to the chunk in each row.
template <class Format, class Isa>
LLMSERVE_INLINE void unpack_tile(const uint8_t* const rows[kTileRows], int num_groups, Tile& tile) {
  if constexpr (Format::kGroupsInBlock > 1) num_groups = kGroupsInChunk;
#pragma GCC unroll 8
  for (int g = 0; g < num_groups; ++g) {
    I32x8 quads[8];
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) quads[r] = (I32x8)Format::quants(rows[r], g);
    transpose(quads);
#pragma GCC unroll 8
    for (int q = 0; q < kGroup / 4; ++q) store(tile.quants[g][q], quads[q]);
  }
  unpack_scales<Format, Isa>(rows, num_groups, tile);
}

}  // namespace
}  // namespace llmserve
