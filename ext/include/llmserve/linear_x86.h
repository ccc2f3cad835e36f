// What the Isa structs of linear_body.h have in common on x86. Included after target_*.h.
#pragma once

#include <immintrin.h>

#include "llmserve/linear_tile.h"

namespace llmserve {
namespace {

struct X86 {
  static LLMSERVE_INLINE F32x8 from_half(U16x8 half) {
    return (F32x8)_mm256_cvtph_ps((__m128i)half);
  }

  static LLMSERVE_INLINE I32x8 widen_bytes(uint64_t bytes) {
    return (I32x8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
  }

  static LLMSERVE_INLINE I32x8 widen_halves(U16x8 halves) {
    return (I32x8)_mm256_cvtepu16_epi32((__m128i)halves);
  }

  static LLMSERVE_INLINE I8x32 narrow(const I32x8 v[4]) {
    const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
    // Packing goes by halves of registers; this puts the quads back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (I8x32)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  }

  static LLMSERVE_INLINE F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    return (F32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }

  static LLMSERVE_INLINE I32x8 pair_dot(I32x8 a, I32x8 b) {
    return (I32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  }
};

}  // namespace
}  // namespace llmserve
