// linear.h with AVX-512 VNNI.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "llmserve/linear.h"
#include "llmserve/target_avx512_vnni.h"
//
#include "llmserve/linear_x86.h"

// GCC 12 takes the operand that its own intrinsics leave undefined for a mistake (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace llmserve {
namespace {

struct Isa : X86 {
  using Floats = F32x16;
  using Ints = I32x16;
  using Shorts = U16x32;
  static constexpr int kTileRows = 16;
  static constexpr int kMaxTokens = 8;

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

  static LLMSERVE_INLINE U8x32 with_fifth_bits(U8x32 nibbles, const uint8_t* bits) {
    return (U8x32)_mm256_mask_add_epi8((__m256i)nibbles, load<__mmask32>(bits), (__m256i)nibbles,
                                       _mm256_set1_epi8(0x10));
  }

  static LLMSERVE_INLINE I32x8 row_dot(U8x32 quants, const int16_t* activations) {
    const __m256i even = (__m256i)(quants & (U8x32)broadcast(int32_t{0x00ff00ff}));
    const __m256i odd = _mm256_srli_epi16((__m256i)quants, 8);
    const __m256i sums =
        _mm256_dpwssd_epi32(_mm256_setzero_si256(), even, load<__m256i>(activations));
    return (I32x8)_mm256_dpwssd_epi32(sums, odd, load<__m256i>(activations + kGroup / 2));
  }

  template <int kHalves, int kTokens>
  static LLMSERVE_INLINE void group_dots(const int16_t (*quants)[kTileRows][2],
                                         const ActivationChunk* chunks, int g,
                                         I32x16 (*sums)[kHalves]) {
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      __m512i dots[kTokens];
      for (int t = 0; t < kTokens; ++t) dots[t] = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int i = 0; i < kPairs / kHalves; ++i) {
        const int pair = pair_of_half<kHalves>(half, i);
        const auto w = load<__m512i>(quants[pair]);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const __m512i x = _mm512_set1_epi32(load<int32_t>(chunks[t].quants[g] + 2 * pair));
          dots[t] = _mm512_dpwssd_epi32(dots[t], w, x);
        }
      }
      for (int t = 0; t < kTokens; ++t) sums[t][half] = (I32x16)dots[t];
    }
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_body.h"

namespace llmserve {

const LinearKernels kLinearAvx512Vnni = {kTileRows, quantize, multiply, dequantize_row};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
