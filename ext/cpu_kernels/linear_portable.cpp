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
  using Floats = F32x8;
  using Ints = I32x8;
  using Shorts = U16x16;
  using Bytes = U8x32;
  static constexpr int kTileRows = 8;
  static constexpr int kMaxTokens = 4;
  static constexpr bool kHasFewTokenKernels = false;

  static LLMSERVE_INLINE I32x8 widen_bytes(uint64_t bytes) {
    return __builtin_convertvector((U8x8)bytes, I32x8);
  }

  static LLMSERVE_INLINE I32x8 widen_halves(U16x8 halves) {
    return __builtin_convertvector(halves, I32x8);
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

  static LLMSERVE_INLINE void transpose_quads(const U8x32 rows[8], I32x8 quads[8]) {
    for (int r = 0; r < 8; ++r) quads[r] = (I32x8)rows[r];
    transpose(quads);
  }

  // The products of the lower and of the upper int16 of each lane, added.
  static LLMSERVE_INLINE I32x8 pair_dot(I32x8 a, I32x8 b) {
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
  }

  static LLMSERVE_INLINE U8x32 with_bits(U8x32 v, const uint8_t* bits, uint8_t value) {
    return llmserve::with_bits(v, bits, value);
  }

  static LLMSERVE_INLINE I32x8 row_dot(U8x32 quants, const int16_t* activations) {
    const auto even = (I32x8)quants & 0x00ff00ff;
    const auto odd = (I32x8)((U16x16)quants >> 8);
    return pair_dot(even, load<I32x8>(activations)) +
           pair_dot(odd, load<I32x8>(activations + kGroup / 2));
  }

  static LLMSERVE_INLINE void sum_halves(I32x8 v[8], I32x8 sums[2]) {
    transpose(v);
    sums[0] = v[0] + v[1] + v[2] + v[3];
    sums[1] = v[4] + v[5] + v[6] + v[7];
  }

  static LLMSERVE_INLINE I32x8 add_pairs(I32x8 sums, U16x16 weights, int32_t activations) {
    return sums + pair_dot((I32x8)weights, broadcast(activations));
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_body.h"

namespace llmserve {

const LinearKernels kLinearPortable = {kTileRows, quantize, multiply, dequantize_row};

}  // namespace llmserve
