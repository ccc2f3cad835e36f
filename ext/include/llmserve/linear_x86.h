// What the Isa structs of linear_body.h have in common on x86. Included after target_*.h.
#pragma once

#include <immintrin.h>

#include "llmserve/linear_tile.h"

namespace llmserve {
namespace {

struct X86 {
  static LLMSERVE_INLINE I32x8 row_dot(U8x32 quants, const int16_t* wide) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i first = _mm256_unpacklo_epi8((__m256i)quants, zero);
    const __m256i second = _mm256_unpackhi_epi8((__m256i)quants, zero);
    return (I32x8)_mm256_add_epi32(_mm256_madd_epi16(first, load<__m256i>(wide)),
                                   _mm256_madd_epi16(second, load<__m256i>(wide + 16)));
  }

  static LLMSERVE_INLINE I32x8 sum_rows(const I32x8 v[8]) {
    const __m256i a = _mm256_hadd_epi32((__m256i)v[0], (__m256i)v[1]);
    const __m256i b = _mm256_hadd_epi32((__m256i)v[2], (__m256i)v[3]);
    const __m256i c = _mm256_hadd_epi32((__m256i)v[4], (__m256i)v[5]);
    const __m256i d = _mm256_hadd_epi32((__m256i)v[6], (__m256i)v[7]);
    const __m256i low = _mm256_hadd_epi32(a, b);   // rows 0-3, of columns in each half
    const __m256i high = _mm256_hadd_epi32(c, d);  // rows 4-7
    return (I32x8)_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                   _mm256_permute2x128_si256(low, high, 0x31));
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
