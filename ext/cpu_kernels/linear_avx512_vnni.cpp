// linear.h with AVX-512 VNNI, in 256-bit registers: they keep the tiles as small as AVX2's.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "llmserve/linear.h"
#include "llmserve/target_avx512_vnni.h"
//
#include "llmserve/linear_x86.h"

namespace llmserve {
namespace {

struct Isa : X86 {
  static constexpr int kMaxTokens = 8;

  template <class Format>
  static constexpr bool kKeepsOffset = true;

  static LLMSERVE_INLINE I32x8 encode_subscale(I32x8 sub) { return sub; }

  template <class Format, int kTokens>
  static LLMSERVE_INLINE void group_dots(const Tile& tile, int g, const ActivationChunk* chunks,
                                         int plane, I32x8* sums) {
    for (int t = 0; t < kTokens; ++t) sums[t] = I32x8{};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i dots[kTokens];
      for (int t = 0; t < kTokens; ++t) dots[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int q = 4 * half; q < 4 * half + 4; ++q) {
        const auto w = load<__m256i>(tile.quants[g][q]);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const __m256i x = _mm256_set1_epi32(load<int32_t>(chunks[t].quants[plane][g] + 4 * q));
          dots[t] = _mm256_dpbusd_epi32(dots[t], w, x);
        }
      }
      for (int t = 0; t < kTokens; ++t) {
        sums[t] += Format::kHasSubscales ? (I32x8)dots[t] * tile.sub[g][half] : (I32x8)dots[t];
      }
    }
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_body.h"

namespace llmserve {

const LinearKernels kLinearAvx512Vnni = {quantize, multiply, dequantize_row};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
