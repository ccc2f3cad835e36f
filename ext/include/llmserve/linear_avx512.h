// What the AVX-512 kernels of linear.h have in common. Included after target_avx512_*.h.
#pragma once

#include "llmserve/linear_x86.h"

namespace llmserve {
namespace {

struct Avx512 : X86 {
  using X86::fma;
  static LLMSERVE_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }

  static LLMSERVE_INLINE void transpose_quads(const U8x32 rows[16], I32x16 quads[8]) {
    // Two rows a register, four apart; then 4 x 4 transpositions within each 128 bits give, for
    // quads k and k + 4, [k of rows 0-3, k + 4 of rows 0-3, k of rows 4-7, k + 4 of rows 4-7].
    __m512i part[2][4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m512i pair[4];
      for (int r = 0; r < 4; ++r) {
        pair[r] = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)rows[8 * i + r]),
                                     (__m256i)rows[8 * i + r + 4], 1);
      }
      const __m512i low01 = _mm512_unpacklo_epi32(pair[0], pair[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(pair[2], pair[3]);
      const __m512i high01 = _mm512_unpackhi_epi32(pair[0], pair[1]);
      const __m512i high23 = _mm512_unpackhi_epi32(pair[2], pair[3]);
      part[i][0] = _mm512_unpacklo_epi64(low01, low23);
      part[i][1] = _mm512_unpackhi_epi64(low01, low23);
      part[i][2] = _mm512_unpacklo_epi64(high01, high23);
      part[i][3] = _mm512_unpackhi_epi64(high01, high23);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      quads[k] = (I32x16)_mm512_shuffle_i64x2(part[0][k], part[1][k], 0x88);
      quads[k + 4] = (I32x16)_mm512_shuffle_i64x2(part[0][k], part[1][k], 0xdd);
    }
  }
};

}  // namespace
}  // namespace llmserve
