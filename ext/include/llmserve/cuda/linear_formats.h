// The storage formats of quantised matrices as they lie on the device, one struct each.
//
// Columns are padded to a multiple of 128, with scales of zero, and divided into chunks of 128, or
// of 64 where codes have 8 bits. The codes of a row's chunk lie in a low plane of 8, 4 or 2 bits
// and for some formats a high plane of 1 or 2 bits more. Four lanes share a chunk; lane t holds 8
// codes of each of its groups of 32 columns: columns 8t to 8t + 7, or, where a group's halves have
// scales of their own, 4t to 4t + 3 of each half. So a warp reads 64 contiguous bytes of each of 8
// rows in one go, and what a lane reads are operands of tensor cores after a shift and a mask: the
// two codes of a pair of columns lie 16 bits apart.
//
// A value is scale * code + shift, the code being unsigned. A code of n bits becomes the float
// 2^n + code by setting the exponent; callers subtract 2^n times the sum of the activations.
#pragma once

#include <type_traits>

#include "llmserve/cuda/device.h"
#include "llmserve/cuda/linear.h"

namespace llmserve::cuda {

constexpr int kGroup = 32;
constexpr int kLanesInChunk = 4;
constexpr int kPadding = 128;  // columns come in multiples of it

struct KernelPart {  // of a launch whose parts have one format
  const uint8_t* low;
  const uint8_t* high;
  const uint8_t* scales;
  const uint8_t* super_scales;
  const float* bias;
  int64_t num_rows;
  int64_t first_tile;  // tiles of 16 rows in the parts before it
  int64_t out_column;  // of its first row
  int chunk_scales;     // of the ROW formats: 1, or 0 if a scale is a whole row's
};

struct Affine {
  float scale;
  float shift;
};

// A chunk of a row, counted through all rows. A matrix has less than 2^31 of them.
struct ChunkPlace {
  const KernelPart& part;
  int row;
  int chunk;
  int pair;  // of chunks; a row has an even number of those that come in pairs

  LLMSERVE_DEVICE ChunkPlace(const KernelPart& part_, int row_, int chunk_, int num_chunks)
      : part(part_),
        row(row_),
        chunk(row_ * num_chunks + chunk_),
        pair(row_ * (num_chunks / 2) + chunk_ / 2) {}
};

// Bytes of chunk `index` in a plane.
template <int kBytes>
LLMSERVE_DEVICE const uint8_t* plane_entry(const uint8_t* plane, int index) {
  return plane + static_cast<int64_t>(index) * kBytes;
}

template <typename T>
struct Mantissa;
template <>
struct Mantissa<half> {
  static constexpr int kBits = 10, kBias = 15;
};
template <>
struct Mantissa<bfloat16> {
  static constexpr int kBits = 7, kBias = 127;
};

// The same number in both halves of a word: as a float whose mantissa is zero, 2^exponent.
template <typename T>
LLMSERVE_DEVICE constexpr uint32_t power_pair(int exponent) {
  return static_cast<uint32_t>((Mantissa<T>::kBias + exponent) << Mantissa<T>::kBits) * 0x00010001u;
}

// Moves the kBits bits at `position` of both halves of a word to `target`.
template <int kBits>
LLMSERVE_DEVICE uint32_t move_bits(uint32_t word, int position, int target) {
  const uint32_t moved =
      position >= target ? word >> (position - target) : word << (target - position);
  return moved & (((1u << kBits) - 1) * 0x00010001u << target);
}

LLMSERVE_DEVICE void load_words(const uint8_t* address, uint32_t (&words)[1]) {
  words[0] = *reinterpret_cast<const uint32_t*>(address);
}

LLMSERVE_DEVICE void load_words(const uint8_t* address, uint32_t (&words)[2]) {
  const uint64_t both = *reinterpret_cast<const uint64_t*>(address);
  words[0] = static_cast<uint32_t>(both);
  words[1] = static_cast<uint32_t>(both >> 32);
}

LLMSERVE_DEVICE void set_words(Vec16 v, uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = v.w[i];
}

LLMSERVE_DEVICE int byte_of(uint32_t word, int i) { return static_cast<int>(word >> 8 * i & 0xff); }

LLMSERVE_DEVICE int signed_byte_of(uint32_t word, int i) {
  return static_cast<int>(word << (24 - 8 * i)) >> 24;
}

// Codes of kLow + kHigh bits. kOffset: the code that means zero.
template <int kLow, int kHigh, bool kHalves_>
struct Codes {
  static constexpr int kLowBits = kLow, kHighBits = kHigh, kBits = kLow + kHigh;
  static constexpr int kGroups = kLow == 8 ? 2 : 4;
  static constexpr int kChunk = kGroups * kGroup;
  static constexpr bool kHalves = kHalves_;  // the halves of a group have their own scales
  static constexpr bool kIsInteger = true;
  static constexpr bool kIsRowScaled = false;  // a chunk has one scale

  // Codes of more bits than a mantissa has are the sum of two operands, of 4 bits each.
  template <typename T>
  static constexpr int kOperands = kBits > Mantissa<T>::kBits ? 2 : 1;

  // What the operands of a code add to it.
  template <typename T>
  static constexpr float kBase = kOperands<T> == 2 ? 256.0f + 16.0f : 1.0f * (1 << kBits);

  // Pairs of columns of group w: operands[.][p] holds the lane's columns 2p and 2p + 1.
  template <typename T, class Raw>
  static LLMSERVE_DEVICE void operands(const Raw& raw, int w, uint32_t (&out)[kOperands<T>][4]) {
    constexpr int kMantissa = Mantissa<T>::kBits;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t low = raw.low[low_word(w, p)];
      const int position = low_position(w, p);
      if constexpr (kOperands<T> == 2) {
        out[0][p] = move_bits<4>(low, position + 4, kMantissa - 4) | power_pair<T>(8);
        out[1][p] = move_bits<4>(low, position, kMantissa - 4) | power_pair<T>(4);
      } else {
        constexpr int kTarget = kMantissa - kBits;
        out[0][p] = move_bits<kLow>(low, position, kTarget) | power_pair<T>(kBits);
        if constexpr (kHigh > 0) {
          const uint32_t high = raw.high[high_word(w)];
          out[0][p] |= move_bits<kHigh>(high, high_position(w, p), kTarget + kLow);
        }
      }
    }
  }

  template <class Raw>
  static LLMSERVE_DEVICE float value(const Raw& raw, int w, int i, Affine affine) {
    const int p = i / 2;
    uint32_t code = raw.low[low_word(w, p)] >> (low_position(w, p) + 16 * (i % 2));
    code &= (1u << kLow) - 1;
    if constexpr (kHigh > 0) {
      const uint32_t high = raw.high[high_word(w)] >> (high_position(w, p) + 16 * (i % 2));
      code |= (high & ((1u << kHigh) - 1)) << kLow;
    }
    // One rounding, as the products are exact: the bits that ggml defines.
    return fmaf(affine.scale, static_cast<float>(code), affine.shift);
  }

 private:
  static LLMSERVE_DEVICE constexpr int low_word(int w, int p) {
    return kLow == 8 ? 2 * w + p / 2 : kLow == 4 ? w : w / 2;
  }
  static LLMSERVE_DEVICE constexpr int low_position(int w, int p) {
    return kLow == 8 ? p % 2 * 8 : kLow == 4 ? 4 * p : w % 2 * 8 + 2 * p;
  }
  static LLMSERVE_DEVICE constexpr int high_word(int w) { return kHigh == 2 ? w / 2 : 0; }
  static LLMSERVE_DEVICE constexpr int high_position(int w, int p) {
    return kHigh == 2 ? w % 2 * 8 + 2 * p : 4 * w + p;
  }
};

// float16 scale per group.
template <int kLow, int kHigh, int kOffset>
struct HalfScaled : Codes<kLow, kHigh, false> {
  static constexpr int kScaleWords = kLow == 8 ? 1 : 2;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[kScaleWords]) {
    load_words(plane_entry<4 * kScaleWords>(place.part.scales, place.chunk), words);
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[kScaleWords], int, int w, int) {
    float low, high;
    unpack_pair<half>(words[w / 2], low, high);
    const float scale = w % 2 ? high : low;
    return {scale, -kOffset * scale};
  }
};

using Q4_0 = HalfScaled<4, 0, 8>;
using Q5_0 = HalfScaled<4, 1, 16>;
using Q8_0 = HalfScaled<8, 0, 128>;

// A pair of float16 per group: the scale, and a minimum or a zero point.
template <int kHigh, bool kHasZeroPoint>
struct PairScaled : Codes<4, kHigh, false> {
  static constexpr int kScaleWords = 4;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[4]) {
    set_words(load16(plane_entry<16>(place.part.scales, place.chunk)), words);
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[4], int, int w, int) {
    float scale, second;
    unpack_pair<half>(words[w], scale, second);
    return {scale, kHasZeroPoint ? -scale * second : second};
  }
};

using Q4_1 = PairScaled<0, false>;
using Q5_1 = PairScaled<1, false>;
using INT4_32 = PairScaled<0, true>;

// Per block of 256 columns two float16, then eight scales and eight minima of 6 bits.
template <int kHigh>
struct SixBitScaled : Codes<4, kHigh, false> {
  static constexpr int kScaleWords = 4;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[4]) {
    set_words(load16(plane_entry<16>(place.part.scales, place.pair)), words);
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[4], int half_block, int w, int) {
    uint32_t scales = words[1] & 0x3f3f3f3fu;
    uint32_t mins = words[2] & 0x3f3f3f3fu;
    if (half_block) {
      scales = (words[3] & 0x0f0f0f0fu) | (words[1] >> 2 & 0x30303030u);
      mins = (words[3] >> 4 & 0x0f0f0f0fu) | (words[2] >> 2 & 0x30303030u);
    }
    float scale, min;
    unpack_pair<half>(words[0], scale, min);
    return {scale * byte_of(scales, w), -min * byte_of(mins, w)};
  }
};

using Q4_K = SixBitScaled<0>;
using Q5_K = SixBitScaled<1>;

// An int8 scale for each half of a group, a float16 per block.
struct Q6_K : Codes<4, 2, true> {
  static constexpr int kScaleWords = 3;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[3]) {
    uint32_t scales[2];
    load_words(plane_entry<8>(place.part.scales, place.chunk), scales);
    words[0] = scales[0];
    words[1] = scales[1];
    const auto* super = reinterpret_cast<const half*>(place.part.super_scales);
    words[2] = float_to_bits(to_float(super[place.pair]));
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[3], int, int w, int h) {
    const float scale = bits_to_float(words[2]) * signed_byte_of(words[w / 2], w % 2 * 2 + h);
    return {scale, -32.0f * scale};
  }
};

// Per block sixteen scales of 6 bits in 12 bytes, then a float16 and 2 bytes of padding.
struct Q3_K : Codes<2, 1, true> {
  static constexpr int kScaleWords = 4;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[4]) {
    set_words(load16(plane_entry<16>(place.part.scales, place.pair)), words);
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[4], int half_block, int w, int h) {
    const int i = 2 * w + h;
    const uint32_t low = words[i / 4] >> 4 * half_block & 0x0f0f0f0fu;
    const uint32_t high = words[2] >> (4 * half_block + i / 4 * 2) & 0x03030303u;
    float super, unused;
    unpack_pair<half>(words[3], super, unused);
    const float scale = super * (byte_of(low | high << 4, i % 4) - 32);
    return {scale, -4.0f * scale};
  }
};

// A scale and a minimum of 4 bits for each half of a group, two float16 per block.
struct Q2_K : Codes<2, 0, true> {
  static constexpr int kScaleWords = 3;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[3]) {
    uint32_t scales[2];
    load_words(plane_entry<8>(place.part.scales, place.chunk), scales);
    words[0] = scales[0];
    words[1] = scales[1];
    words[2] = reinterpret_cast<const uint32_t*>(place.part.super_scales)[place.pair];
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[3], int, int w, int h) {
    const int byte = byte_of(words[w / 2], w % 2 * 2 + h);
    float scale, min;
    unpack_pair<half>(words[2], scale, min);
    return {scale * (byte & 0x0f), -min * (byte >> 4)};
  }
};

// The word of a row, or of its 128 columns; `index` counts those.
LLMSERVE_DEVICE uint32_t row_scale_word(const ChunkPlace& place, int block) {
  const int index = place.row + (block - place.row) * place.part.chunk_scales;
  return reinterpret_cast<const uint32_t*>(place.part.scales)[index];
}

// Two float16, scale and zero point, for a row or a chunk.
struct INT4_ROW : Codes<4, 0, false> {
  static constexpr bool kIsRowScaled = true;
  static constexpr int kScaleWords = 1;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[1]) {
    words[0] = row_scale_word(place, place.chunk);
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[1], int, int, int) {
    float scale, zero;
    unpack_pair<half>(words[0], scale, zero);
    return {scale, -scale * zero};
  }
};

// A float32 for a row or a chunk. Codes are the int8 plus 128.
struct INT8_ROW : Codes<8, 0, false> {
  static constexpr bool kIsRowScaled = true;
  static constexpr int kScaleWords = 1;

  static LLMSERVE_DEVICE void load_scales(const ChunkPlace& place, uint32_t (&words)[1]) {
    words[0] = row_scale_word(place, place.pair);
  }
  static LLMSERVE_DEVICE Affine affine(const uint32_t (&words)[1], int, int, int) {
    const float scale = bits_to_float(words[0]);
    return {scale, -128.0f * scale};
  }
};

// As INT8_ROW; the codes are floats, which operands hold exactly.
struct FP8_ROW : INT8_ROW {
  static constexpr bool kIsInteger = false;
  template <typename T>
  static constexpr int kOperands = 1;

  template <typename T, class Raw>
  static LLMSERVE_DEVICE void operands(const Raw& raw, int w, uint32_t (&out)[1][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float values[4];
      unpack_fp8(raw.low[2 * w + i], values);
      out[0][2 * i] = pack_pair<T>(values[0], values[2]);
      out[0][2 * i + 1] = pack_pair<T>(values[1], values[3]);
    }
  }

  template <class Raw>
  static LLMSERVE_DEVICE float value(const Raw& raw, int w, int i, Affine affine) {
    float values[4];
    unpack_fp8(raw.low[2 * w + i / 4], values);
    return affine.scale * values[i % 4 / 2 + i % 2 * 2];
  }
};

// What one lane reads of a row's chunk.
template <class F>
struct Raw {
  uint32_t low[F::kGroups * F::kLowBits / 4];
  uint32_t high[F::kHighBits > 0 ? F::kHighBits : 1];
  uint32_t scales[F::kScaleWords];

  LLMSERVE_DEVICE void load(const KernelPart& part, int row, int chunk, int num_chunks, int t) {
    const ChunkPlace place(part, row, chunk, num_chunks);
    const uint8_t* codes = plane_entry<F::kChunk / 8 * F::kLowBits>(part.low, place.chunk);
    if constexpr (F::kLowBits == 2) {
      load_words(codes + 8 * t, low);
    } else {
      set_words(load16_streaming(codes + 16 * t), low);
    }
    if constexpr (F::kHighBits > 0) {
      const uint8_t* bits = plane_entry<F::kChunk / 8 * F::kHighBits>(part.high, place.chunk);
      load_words(bits + 4 * F::kHighBits * t, high);
    }
    F::load_scales(place, scales);
  }

  // h: the half of the group, for formats that care.
  LLMSERVE_DEVICE Affine affine(int chunk, int w, int h) const {
    return F::affine(scales, chunk % 2, w, h);
  }

  LLMSERVE_DEVICE float value(int chunk, int w, int i) const {
    return F::value(*this, w, i, affine(chunk, w, i / 4));
  }
};

template <class F>
LLMSERVE_BOTH int chunks_in_row(int64_t num_cols) {
  const auto padded = ceil_div(num_cols, static_cast<int64_t>(kPadding)) * kPadding;
  return static_cast<int>(padded / F::kChunk);
}

// First of the four columns that hold the lane's codes 4q to 4q + 3 of a group, q being 0 or 1.
template <class F>
LLMSERVE_DEVICE constexpr int quad_column(int t, int q) {
  return F::kHalves ? 16 * q + 4 * t : 8 * t + 4 * q;
}

}  // namespace llmserve::cuda
