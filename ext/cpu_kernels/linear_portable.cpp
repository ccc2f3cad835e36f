// linear.h with the instructions that the compiler may assume on every machine.
#include <type_traits>

// GCC spends minutes on these vectors, which are wider than the machine's, with more than -O1.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
//
#include "llmserve/linear_tile.h"

namespace llmserve {
namespace {

struct Isa {
  static constexpr int kMaxTokens = 4;

  template <class Format>
  static constexpr bool kKeepsOffset = true;

  static LLMSERVE_INLINE I32x8 widen_bytes(uint64_t bytes) {
    return __builtin_convertvector((U8x8)bytes, I32x8);
  }

  static LLMSERVE_INLINE I32x8 widen_halves(U16x8 halves) {
    return __builtin_convertvector(halves, I32x8);
  }

  static LLMSERVE_INLINE I8x32 narrow(const I32x8 v[4]) {
    I8x32 bytes;
    for (int i = 0; i < 32; ++i) bytes[i] = static_cast<int8_t>(v[i / 8][i % 8]);
    return bytes;
  }

  static LLMSERVE_INLINE F32x8 from_half(U16x8 half) {
    const I32x8 bits = widen_halves(half);
    const I32x8 magnitude = bits & 0x7fff;
    // The exponent is too small by 112; a multiplication also makes subnormals normal.
    const F32x8 scaled = (F32x8)(magnitude << 13) * 0x1p112f;
    const I32x8 is_special = magnitude >= 0x7c00;
    return (F32x8)((I32x8)scaled | (is_special & 0x7f800000) | (bits & 0x8000) << 16);
  }

  static LLMSERVE_INLINE F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < 8; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
  }

  static LLMSERVE_INLINE I32x8 encode_subscale(I32x8 sub) { return sub; }

  static LLMSERVE_INLINE I32x8 pair_dot(I32x8 a, I32x8 b) {
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
  }

  static LLMSERVE_INLINE I32x8 row_dot(U8x32 quants, const int16_t* wide) {
    constexpr int kColumns[4] = {0, 2, 1, 3};
    const auto bytes = (U64x4)quants;
    I32x8 sum = {};
    for (int i = 0; i < 4; ++i) {
      sum += widen_bytes(bytes[kColumns[i]]) *
             __builtin_convertvector(load<I16x8>(wide + 8 * i), I32x8);
    }
    return sum;
  }

  static LLMSERVE_INLINE I32x8 sum_rows(I32x8 v[8]) {
    transpose(v);
    return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7];
  }

  template <class Format, int kTokens>
  static LLMSERVE_INLINE void group_dots(const Tile& tile, int g, const ActivationChunk* chunks,
                                         int plane, I32x8* sums) {
    for (int t = 0; t < kTokens; ++t) {
      const int8_t* x = chunks[t].quants[plane][g];
      I32x8 halves[2] = {};
      for (int q = 0; q < kGroup / 4; ++q) {
        const auto w = load<I32x8>(tile.quants[g][q]);
        for (int i = 0; i < 4; ++i) halves[q / 4] += (w >> (8 * i) & 0xff) * x[4 * q + i];
      }
      if constexpr (Format::kHasSubscales) {
        sums[t] = halves[0] * tile.sub[g][0] + halves[1] * tile.sub[g][1];
      } else {
        sums[t] = halves[0] + halves[1];
      }
    }
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_body.h"

namespace llmserve {

const LinearKernels kLinearPortable = {quantize, multiply, dequantize_row};

}  // namespace llmserve
