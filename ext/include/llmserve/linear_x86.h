// What the Isa structs of linear_body.h have in common on x86. Included after target_*.h.
#pragma once

#include <immintrin.h>

#include "llmserve/linear_tile.h"

namespace llmserve {
namespace {

struct X86 {
  // Two steps of horizontal additions leave the halves of the groups apart.
  static LLMSERVE_INLINE void sum_halves(const I32x8 v[8], I32x8 sums[2]) {
    const __m256i a = _mm256_hadd_epi32((__m256i)v[0], (__m256i)v[1]);
    const __m256i b = _mm256_hadd_epi32((__m256i)v[2], (__m256i)v[3]);
    const __m256i c = _mm256_hadd_epi32((__m256i)v[4], (__m256i)v[5]);
    const __m256i d = _mm256_hadd_epi32((__m256i)v[6], (__m256i)v[7]);
    const __m256i low = _mm256_hadd_epi32(a, b);
    const __m256i high = _mm256_hadd_epi32(c, d);
    sums[0] = (I32x8)_mm256_permute2x128_si256(low, high, 0x20);
    sums[1] = (I32x8)_mm256_permute2x128_si256(low, high, 0x31);
  }

  static LLMSERVE_INLINE F32x8 from_half(U16x8 half) {
    return (F32x8)_mm256_cvtph_ps((__m128i)half);
  }

  static LLMSERVE_INLINE I32x8 widen_bytes(uint64_t bytes) {
    return (I32x8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
  }

  static LLMSERVE_INLINE I32x8 widen_halves(U16x8 halves) {
    return (I32x8)_mm256_cvtepu16_epi32((__m128i)halves);
  }

  static LLMSERVE_INLINE F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    return (F32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
};

}  // namespace
}  // namespace llmserve
