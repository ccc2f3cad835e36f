// linear.h with AVX-512 VNNI.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "llmserve/linear.h"
#include "llmserve/target_avx512_vnni.h"
//
#include "llmserve/linear_avx512.h"

// GCC 12 takes the operand that its own intrinsics leave undefined for a mistake (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace llmserve {
namespace {

struct Isa : Avx512 {
  using Floats = F32x16;
  using Ints = I32x16;
  using Shorts = U16x32;
  using Bytes = U8x64;
  static constexpr int kTileRows = 16;
  static constexpr int kMaxTokens = 8;
  static constexpr bool kHasFewTokenKernels = true;

  static LLMSERVE_INLINE U8x32 with_bits(U8x32 v, const uint8_t* bits, uint8_t value) {
    return (U8x32)_mm256_mask_add_epi8((__m256i)v, load<__mmask32>(bits), (__m256i)v,
                                       _mm256_set1_epi8(static_cast<char>(value)));
  }

  static LLMSERVE_INLINE U8x64 with_bits(U8x64 v, const uint8_t* bits, uint8_t value) {
    return (U8x64)_mm512_mask_add_epi8((__m512i)v, load<__mmask64>(bits), (__m512i)v,
                                       _mm512_set1_epi8(static_cast<char>(value)));
  }

  static LLMSERVE_INLINE I32x8 row_dot(U8x32 quants, const int16_t* activations) {
    const __m256i even = (__m256i)(quants & (U8x32)broadcast(int32_t{0x00ff00ff}));
    const __m256i odd = _mm256_srli_epi16((__m256i)quants, 8);
    const __m256i sums =
        _mm256_dpwssd_epi32(_mm256_setzero_si256(), even, load<__m256i>(activations));
    return (I32x8)_mm256_dpwssd_epi32(sums, odd, load<__m256i>(activations + kGroup / 2));
  }

  static LLMSERVE_INLINE I32x16 add_pairs(I32x16 sums, U16x32 weights, int32_t activations) {
    return (I32x16)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights,
                                       _mm512_set1_epi32(activations));
  }

  static LLMSERVE_INLINE I32x16 add_quads(I32x16 sums, U8x64 weights, int32_t activations) {
    return (I32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights,
                                       _mm512_set1_epi32(activations));
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_bytes.h"

namespace llmserve {

const LinearKernels kLinearAvx512Vnni = {kTileRows, quantize, multiply, dequantize_row};
const ByteKernels kBytesAvx512Vnni = {quantize_bytes, multiply_bytes};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
