// linear.h with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "llmserve/linear.h"
#include "llmserve/target_avx2.h"
//
#include "llmserve/linear_x86.h"

namespace llmserve {
namespace {

struct Isa : X86 {
  using Floats = F32x8;
  using Ints = I32x8;
  using Shorts = U16x16;
  using Bytes = U8x32;
  static constexpr int kTileRows = 8;
  static constexpr int kMaxTokens = 8;
  static constexpr bool kHasFewTokenKernels = true;

  static LLMSERVE_INLINE void transpose_quads(const U8x32 rows[8], I32x8 quads[8]) {
    for (int r = 0; r < 8; ++r) quads[r] = (I32x8)rows[r];
    transpose(quads);
  }

  static LLMSERVE_INLINE U8x32 with_bits(U8x32 v, const uint8_t* bits, uint8_t value) {
    return llmserve::with_bits(v, bits, value);
  }

  static LLMSERVE_INLINE I32x8 row_dot(U8x32 quants, const int16_t* activations) {
    const __m256i even = (__m256i)(quants & (U8x32)broadcast(int32_t{0x00ff00ff}));
    const __m256i odd = _mm256_srli_epi16((__m256i)quants, 8);
    return (I32x8)_mm256_add_epi32(
        _mm256_madd_epi16(even, load<__m256i>(activations)),
        _mm256_madd_epi16(odd, load<__m256i>(activations + kGroup / 2)));
  }

  static LLMSERVE_INLINE I32x8 add_pairs(I32x8 sums, U16x16 weights, int32_t activations) {
    return sums + (I32x8)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(activations));
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_body.h"

namespace llmserve {

const LinearKernels kLinearAvx2 = {kTileRows, quantize, multiply, dequantize_row};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
