// Quantised matrices rearranged for the kernels: tiles of 16 rows with a lane per row.
//
// A tile is its 16 rows, chunk after chunk of up to 8 groups of 32 columns; rows that the matrix
// lacks are zeros. A chunk is
//
//   formats whose blocks are chunks: float16 scale[16], then, if the format has minima, min[16]
//   for each group:
//     ScaleKind::kHalves      float16 scale[16], then, if the format has minima, min[16]
//     ScaleKind::kSixBits     uint8 scale[16], min[16]
//     ScaleKind::kSubscales   int8 sub[2][16]
//     ScaleKind::kSubNibbles  uint8 (sub | sub_min << 4)[2][16]
//     quants in planes
//
// A quad is four neighbouring columns of the 16 rows, 64 numbers, row after row. The planes hold
// the bits of the eight quads of a group, the low ones first:
//
//   8 bits   quad q is 64 bytes
//   4 bits   64 bytes hold quad 2 i in their low, quad 2 i + 1 in their high halves
//   2 bits   64 bytes hold quads 4 i to 4 i + 3, from their lowest bits on
//   1 bit    8 bytes for each quad
//
// A quant of 5 bits is one of the 4-bit plane and 16 times one of the 1-bit plane, and so on.
#pragma once

#include "llmserve/ggml_formats.h"
#include "llmserve/linear.h"

namespace llmserve {
namespace {

constexpr int kQuads = kGroup / 4;
constexpr int kQuadBytes = kPackedRows * 4;

template <class Format>
struct Packed {
  static constexpr bool kIsBlocked = Format::kGroupsInBlock > 1;
  static constexpr int kHalves = kPackedRows * static_cast<int>(sizeof(uint16_t));
  static constexpr int kChunkHeader = kIsBlocked ? kHalves * (Format::kHasMin ? 2 : 1) : 0;
  static constexpr int kGroupHeader =
      kIsBlocked ? 2 * kPackedRows : kHalves * (Format::kHasMin ? 2 : 1);
  static constexpr int kGroupBytes = kGroupHeader + kPackedRows * kGroup * Format::kBits / 8;

  static constexpr int64_t chunk_bytes(int num_groups) {
    return kChunkHeader + num_groups * int64_t{kGroupBytes};
  }
  static constexpr int64_t tile_bytes(int64_t num_cols) {
    const int64_t num_groups = num_cols / kGroup;
    return (num_groups + kGroupsInChunk - 1) / kGroupsInChunk * kChunkHeader +
           num_groups * kGroupBytes;
  }
};

// Offsets of the planes of a group; those that a format lacks have no bytes.
template <class Format>
struct Planes {
  static constexpr int kTwos = Format::kBits & 4 ? kQuads / 2 * kQuadBytes : 0;
  static constexpr int kOnes = kTwos + (Format::kBits & 2 ? kQuads / 4 * kQuadBytes : 0);
  // How far up the bits of a plane belong in a quant.
  static constexpr int kTwosShift = Format::kBits & 4 ? 4 : 0;
  static constexpr int kOnesShift = kTwosShift + (Format::kBits & 2 ? 2 : 0);
};

// Quad q of the rows from `lane` on, one byte each. q is a constant once the loop is unrolled.
template <class Format, class Isa>
LLMSERVE_INLINE typename Isa::Bytes packed_quad(const uint8_t* planes, int q, int lane) {
  using Bytes = typename Isa::Bytes;
  using Shorts = typename Isa::Shorts;
  if constexpr (Format::kBits == 8) return load<Bytes>(planes + q * kQuadBytes + 4 * lane);
  Bytes quants = {};
  if constexpr (Format::kBits & 4) {
    const auto pair = load<Bytes>(planes + q / 2 * kQuadBytes + 4 * lane);
    quants = (q % 2 ? (Bytes)((Shorts)pair >> 4) : pair) & splat<Bytes>(uint8_t{0x0f});
  }
  if constexpr (Format::kBits & 2) {
    const auto four = load<Shorts>(planes + Planes<Format>::kTwos + q / 4 * kQuadBytes + 4 * lane);
    const int up = Planes<Format>::kTwosShift - q % 4 * 2;
    const auto moved = (Bytes)(up > 0 ? four << up : four >> -up);
    quants |= moved & splat<Bytes>(static_cast<uint8_t>(3 << Planes<Format>::kTwosShift));
  }
  if constexpr (Format::kBits & 1) {
    const uint8_t* ones = planes + Planes<Format>::kOnes + q * (kQuadBytes / 8) + lane / 2;
    quants = Isa::with_bits(quants, ones, 1 << Planes<Format>::kOnesShift);
  }
  return quants;
}

// One quant of a group.
template <class Format>
LLMSERVE_INLINE int packed_quant(const uint8_t* planes, int row, int col) {
  const int q = col / 4, place = row * 4 + col % 4;
  if constexpr (Format::kBits == 8) return planes[q * kQuadBytes + place];
  int quant = 0;
  if constexpr (Format::kBits & 4) {
    quant |= planes[q / 2 * kQuadBytes + place] >> q % 2 * 4 & 15;
  }
  if constexpr (Format::kBits & 2) {
    const int two = planes[Planes<Format>::kTwos + q / 4 * kQuadBytes + place] >> q % 4 * 2 & 3;
    quant |= two << Planes<Format>::kTwosShift;
  }
  if constexpr (Format::kBits & 1) {
    const uint8_t* ones = planes + Planes<Format>::kOnes + q * (kQuadBytes / 8);
    quant |= (ones[place / 8] >> place % 8 & 1) << Planes<Format>::kOnesShift;
  }
  return quant;
}

// Writes the quants of one row and quad, a byte each, into planes that are zeros there.
template <class Format>
LLMSERVE_INLINE void pack_quants(uint8_t* planes, int row, int q, uint32_t quants) {
  const auto add = [row](uint8_t* bytes, uint32_t bits) {
    store(bytes + 4 * row, load<uint32_t>(bytes + 4 * row) | bits);
  };
  if constexpr (Format::kBits == 8) add(planes + q * kQuadBytes, quants);
  if constexpr (Format::kBits & 4) {
    add(planes + q / 2 * kQuadBytes, (quants & 0x0f0f0f0fu) << q % 2 * 4);
  }
  if constexpr (Format::kBits & 2) {
    const uint32_t twos = quants >> Planes<Format>::kTwosShift & 0x03030303u;
    add(planes + Planes<Format>::kTwos + q / 4 * kQuadBytes, twos << q % 4 * 2);
  }
  if constexpr (Format::kBits & 1) {
    // The product brings the lowest bits of four bytes together, in its highest byte.
    const uint32_t ones = (quants >> Planes<Format>::kOnesShift & 0x01010101u) * 0x01020408u >> 24;
    uint8_t* target = planes + Planes<Format>::kOnes + q * (kQuadBytes / 8) + row / 2;
    *target = static_cast<uint8_t>(*target | (ones & 15) << row % 2 * 4);
  }
}

}  // namespace
}  // namespace llmserve
