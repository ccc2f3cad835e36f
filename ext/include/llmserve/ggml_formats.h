// The quantised storage types of GGUF files (ggml's block layouts), one struct each.
//
// Rows are read in chunks of up to 8 groups of 32 columns; a K-quant block is one chunk. A struct
// gives the quants of a group as unsigned bytes, and the scales of all groups of a chunk. A value
// is scale * sub[h] * (quant - kOffset) + min * sub_min[h], h being the half of the group, where
// sub and sub_min are 1 unless kHasSubscales and min is 0 unless kHasMin. A quant has kBits bits.
#pragma once

#include "llmserve/simd.h"

namespace llmserve {
namespace {

constexpr int kGroup = 32;         // columns that share a scale, in weights and in activations
constexpr int kGroupsInChunk = 8;  // at most
constexpr int kChunk = kGroup * kGroupsInChunk;

// How a format keeps scale, min, sub and sub_min.
enum class ScaleKind {
  kHalves,      // float16 for each group: scale, then min
  kSixBits,     // float16 for each block, times integers below 64 for each group
  kSubscales,   // float16 for each block, and int8 subscales
  kSubNibbles,  // float16 for each block, and subscales and minima of 4 bits
};

// Bytes of a full chunk of a row.
template <class Format>
constexpr int kChunkBytes = kGroupsInChunk / Format::kGroupsInBlock * Format::kBlockBytes;

struct RowScales {  // of one row; lane g belongs to group g of the chunk
  F32x8 scale = {};
  F32x8 min = {};
  I32x8 sub[2] = {};
  I32x8 sub_min[2] = {};
};

// A 16-bit number of each block of a chunk, from its byte `offset` on; 0 for absent blocks.
template <int kBlockBytes>
LLMSERVE_INLINE U16x8 block_halves(const uint8_t* chunk, int num_groups, int offset) {
  U16x8 halves = {};
  if (num_groups == kGroupsInChunk) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroupsInChunk; ++g) {
      halves[g] = load<uint16_t>(chunk + g * kBlockBytes + offset);
    }
    return halves;
  }
  for (int g = 0; g < num_groups; ++g) {
    halves[g] = load<uint16_t>(chunk + g * kBlockBytes + offset);
  }
  return halves;
}

// Columns 0 to 15 from the low, columns 16 to 31 from the high halves of 16 bytes.
LLMSERVE_INLINE U8x32 split_nibbles(const uint8_t* bytes) {
  const auto low = load<U64x2>(bytes);
  const U64x2 high = low >> 4;
  return (U8x32)U64x4{low[0], low[1], high[0], high[1]} & broadcast(uint8_t{0x0f});
}

// Adds `value`, one bit, to the bytes whose bit in 32 bits is set.
LLMSERVE_INLINE U8x32 with_bits(U8x32 v, const uint8_t* bytes, uint8_t value) {
  const auto bits = (U8x32)broadcast(load<int32_t>(bytes));
  const U8x32 spread = LLMSERVE_SHUFFLE_BYTES(bits, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                              18, 18, 18, 18, 18, 18, 18, 18, 19, 19, 19, 19, 19,
                                              19, 19, 19);
  const auto select = (U8x32)(U64x4{} + 0x8040201008040201u);
  return v | ((U8x32)((spread & select) == select) & broadcast(value));
}

struct Q8_0 {
  static constexpr int kBlockBytes = 34, kGroupsInBlock = 1;
  static constexpr int kOffset = 128;
  static constexpr bool kHasMin = false, kHasSubscales = false;
  static constexpr int kBits = 8;
  static constexpr ScaleKind kScaleKind = ScaleKind::kHalves;
  static constexpr int kScaleByte = 0, kMinByte = 0;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* chunk, int g) {
    return load<U8x32>(chunk + g * kBlockBytes + 2) ^ broadcast(uint8_t{0x80});
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* chunk, int num_groups) {
    RowScales s;
    s.scale = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 0));
    return s;
  }
};

struct Q4_0 {
  static constexpr int kBlockBytes = 18, kGroupsInBlock = 1;
  static constexpr int kOffset = 8;
  static constexpr bool kHasMin = false, kHasSubscales = false;
  static constexpr int kBits = 4;
  static constexpr ScaleKind kScaleKind = ScaleKind::kHalves;
  static constexpr int kScaleByte = 0, kMinByte = 0;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* chunk, int g) {
    return split_nibbles(chunk + g * kBlockBytes + 2);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* chunk, int num_groups) {
    RowScales s;
    s.scale = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 0));
    return s;
  }
};

struct Q4_1 {
  static constexpr int kBlockBytes = 20, kGroupsInBlock = 1;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true, kHasSubscales = false;
  static constexpr int kBits = 4;
  static constexpr ScaleKind kScaleKind = ScaleKind::kHalves;
  static constexpr int kScaleByte = 0, kMinByte = 2;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* chunk, int g) {
    return split_nibbles(chunk + g * kBlockBytes + 4);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* chunk, int num_groups) {
    RowScales s;
    s.scale = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 0));
    s.min = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 2));
    return s;
  }
};

struct Q5_0 {
  static constexpr int kBlockBytes = 22, kGroupsInBlock = 1;
  static constexpr int kOffset = 16;
  static constexpr bool kHasMin = false, kHasSubscales = false;
  static constexpr int kBits = 5;
  static constexpr ScaleKind kScaleKind = ScaleKind::kHalves;
  static constexpr int kScaleByte = 0, kMinByte = 0;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* chunk, int g) {
    const uint8_t* block = chunk + g * kBlockBytes;
    return Isa::with_bits(split_nibbles(block + 6), block + 2, 0x10);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* chunk, int num_groups) {
    RowScales s;
    s.scale = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 0));
    return s;
  }
};

struct Q5_1 {
  static constexpr int kBlockBytes = 24, kGroupsInBlock = 1;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true, kHasSubscales = false;
  static constexpr int kBits = 5;
  static constexpr ScaleKind kScaleKind = ScaleKind::kHalves;
  static constexpr int kScaleByte = 0, kMinByte = 2;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* chunk, int g) {
    const uint8_t* block = chunk + g * kBlockBytes;
    return Isa::with_bits(split_nibbles(block + 8), block + 4, 0x10);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* chunk, int num_groups) {
    RowScales s;
    s.scale = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 0));
    s.min = Isa::from_half(block_halves<kBlockBytes>(chunk, num_groups, 2));
    return s;
  }
};

// Below: blocks of 256 columns. `g` is a constant once the loop over groups is unrolled.

template <class Isa>
LLMSERVE_INLINE F32x8 half_broadcast(const uint8_t* half) {
  return broadcast(Isa::from_half(U16x8{load<uint16_t>(half)})[0]);
}

// Two bits of each of 32 bytes; the shift is the group's place among four.
LLMSERVE_INLINE U8x32 two_bits(const uint8_t* bytes, int place) {
  const auto value = load<U8x32>(bytes);
  switch (place) {
    case 0:
      return value & broadcast(uint8_t{3});
    case 1:
      return shifted_bits<2>(value, 3);
    case 2:
      return shifted_bits<4>(value, 3);
    default:
      return shifted_bits<6>(value, 3);
  }
}

// Bit `bit` of each of 32 bytes, as the bit `target`.
LLMSERVE_INLINE U8x32 one_bit(const uint8_t* bytes, int bit, uint8_t target) {
  const U8x32 select = broadcast(static_cast<uint8_t>(1u << bit));
  return (U8x32)((load<U8x32>(bytes) & select) == select) & broadcast(target);
}

LLMSERVE_INLINE U8x32 nibbles(const uint8_t* bytes, bool is_high) {
  const auto value = load<U8x32>(bytes);
  return is_high ? shifted_bits<4>(value, 0x0f) : value & broadcast(uint8_t{0x0f});
}

// Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes.
struct SixBits {
  uint64_t scales, mins;  // a byte for each group
};

LLMSERVE_INLINE SixBits six_bits(const uint8_t* block) {
  const auto a = load<uint32_t>(block + 4);
  const auto b = load<uint32_t>(block + 8);
  const auto c = load<uint32_t>(block + 12);
  const uint64_t scale_high = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
  const uint64_t min_high = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
  return {scale_high << 32 | (a & 0x3f3f3f3fu), min_high << 32 | (b & 0x3f3f3f3fu)};
}

template <class Isa>
LLMSERVE_INLINE RowScales six_bit_scales(const uint8_t* block) {
  const SixBits bits = six_bits(block);
  const I32x8 scale = Isa::widen_bytes(bits.scales);
  const I32x8 min = Isa::widen_bytes(bits.mins);
  RowScales s;
  s.scale = half_broadcast<Isa>(block) * to_float(scale);
  s.min = -half_broadcast<Isa>(block + 2) * to_float(min);
  return s;
}

struct Q4_K {
  static constexpr int kBlockBytes = 144, kGroupsInBlock = 8;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true, kHasSubscales = false;
  static constexpr int kBits = 4;
  static constexpr ScaleKind kScaleKind = ScaleKind::kSixBits;
  static constexpr int kScaleByte = 0, kMinByte = 2;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* block, int g) {
    return nibbles(block + 16 + g / 2 * 32, g % 2);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* block, int) {
    return six_bit_scales<Isa>(block);
  }
};

struct Q5_K {
  static constexpr int kBlockBytes = 176, kGroupsInBlock = 8;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true, kHasSubscales = false;
  static constexpr int kBits = 5;
  static constexpr ScaleKind kScaleKind = ScaleKind::kSixBits;
  static constexpr int kScaleByte = 0, kMinByte = 2;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* block, int g) {
    return nibbles(block + 48 + g / 2 * 32, g % 2) | one_bit(block + 16, g, 0x10);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* block, int) {
    return six_bit_scales<Isa>(block);
  }
};

struct Q6_K {
  static constexpr int kBlockBytes = 210, kGroupsInBlock = 8;
  static constexpr int kOffset = 32;
  static constexpr bool kHasMin = false, kHasSubscales = true;
  static constexpr int kBits = 6;
  static constexpr ScaleKind kScaleKind = ScaleKind::kSubscales;
  static constexpr int kScaleByte = 208, kMinByte = 0;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* block, int g) {
    const U8x32 high = two_bits(block + 128 + g / 4 * 32, g % 4);
    return nibbles(block + g / 4 * 64 + g % 2 * 32, g % 4 >= 2) | (U8x32)((U16x16)high << 4);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* block, int) {
    RowScales s;
    s.scale = half_broadcast<Isa>(block + kScaleByte);
    subscales<Isa>(block, s);
    return s;
  }
  template <class Isa>
  static LLMSERVE_INLINE void subscales(const uint8_t* block, RowScales& s) {
    // A pair of int8 for each group; the shifts extend their signs.
    const I32x8 pairs = Isa::widen_halves(load<U16x8>(block + 192));
    s.sub[0] = pairs << 24 >> 24;
    s.sub[1] = pairs << 16 >> 24;
  }
};

struct Q3_K {
  static constexpr int kBlockBytes = 110, kGroupsInBlock = 8;
  static constexpr int kOffset = 4;
  static constexpr bool kHasMin = false, kHasSubscales = true;
  static constexpr int kBits = 3;
  static constexpr ScaleKind kScaleKind = ScaleKind::kSubscales;
  static constexpr int kScaleByte = 108, kMinByte = 0;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* block, int g) {
    return two_bits(block + 32 + g / 4 * 32, g % 4) | one_bit(block, g, 0x04);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* block, int) {
    RowScales s;
    s.scale = half_broadcast<Isa>(block + kScaleByte);
    subscales<Isa>(block, s);
    return s;
  }
  template <class Isa>
  static LLMSERVE_INLINE void subscales(const uint8_t* block, RowScales& s) {
    // Sixteen scales of 6 bits: the low four bits in 8 bytes, the high two in the 4 after them.
    const auto low = load<uint64_t>(block + 96);
    const auto high = load<uint32_t>(block + 104);
    const uint64_t high_first = high | static_cast<uint64_t>(high >> 2) << 32;
    const uint64_t first = (low & kNibbles) | (high_first & kTwoBits) << 4;
    const uint64_t second = (low >> 4 & kNibbles) | (high_first >> 4 & kTwoBits) << 4;
    // Even bytes are the first halves of groups, odd bytes the second halves.
    const I32x8 pairs = Isa::widen_halves((U16x8)U64x2{first, second});
    s.sub[0] = (pairs & 0xff) - 32;
    s.sub[1] = (pairs >> 8) - 32;
  }

 private:
  static constexpr uint64_t kNibbles = 0x0f0f0f0f0f0f0f0fu;
  static constexpr uint64_t kTwoBits = 0x0303030303030303u;
};

struct Q2_K {
  static constexpr int kBlockBytes = 84, kGroupsInBlock = 8;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true, kHasSubscales = true;
  static constexpr int kBits = 2;
  static constexpr ScaleKind kScaleKind = ScaleKind::kSubNibbles;
  static constexpr int kScaleByte = 80, kMinByte = 82;  // where a block has them

  template <class Isa>
  static LLMSERVE_INLINE U8x32 quants(const uint8_t* block, int g) {
    return two_bits(block + 16 + g / 4 * 32, g % 4);
  }
  template <class Isa>
  static LLMSERVE_INLINE RowScales scales(const uint8_t* block, int) {
    RowScales s;
    s.scale = half_broadcast<Isa>(block + kScaleByte);
    s.min = -half_broadcast<Isa>(block + kMinByte);
    subscales<Isa>(block, s);
    return s;
  }
  template <class Isa>
  static LLMSERVE_INLINE void subscales(const uint8_t* block, RowScales& s) {
    const I32x8 pairs = Isa::widen_halves(load<U16x8>(block));
    s.sub[0] = pairs & 0x0f;
    s.sub_min[0] = pairs >> 4 & 0x0f;
    s.sub[1] = pairs >> 8 & 0x0f;
    s.sub_min[1] = pairs >> 12;
  }
};

}  // namespace
}  // namespace llmserve
