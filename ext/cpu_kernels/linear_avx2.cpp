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
  static constexpr int kMaxTokens = 4;

  // vpmaddubsw adds two products in 16 bits, which quants above 127 would overflow. Those are
  // multiplied as signed numbers.
  template <class Format>
  static constexpr bool kKeepsOffset = Format::kMaxQuant <= 127;

  // How many of its results can be added in 16 bits.
  template <class Format>
  static constexpr int max_quads() {
    const int quads = 32767 / (2 * 127 * Format::kMaxQuant);
    const int limit = Format::kHasSubscales ? 4 : 8;
    int power = 1;
    while (power * 2 <= quads && power < limit) power *= 2;
    return power;
  }

  // Both halves of the lane, for pair_dot.
  static LLMSERVE_INLINE I32x8 encode_subscale(I32x8 sub) { return pack_pair(sub, sub); }

  template <class Format, int kTokens>
  static LLMSERVE_INLINE void group_dots(const Tile& tile, int g, const ActivationChunk* chunks,
                                         int plane, I32x8* sums) {
    constexpr int kQuads = max_quads<Format>();
    for (int t = 0; t < kTokens; ++t) sums[t] = I32x8{};
#pragma GCC unroll 8
    for (int begin = 0; begin < kGroup / 4; begin += kQuads) {
      const I32x8 sub =
          Format::kHasSubscales ? tile.sub[g][begin / 4] : broadcast(int32_t{0x00010001});
      __m256i partial[kTokens];
#pragma GCC unroll 8
      for (int q = begin; q < begin + kQuads; ++q) {
        const auto w = load<__m256i>(tile.quants[g][q]);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const __m256i x = _mm256_set1_epi32(load<int32_t>(chunks[t].quants[plane][g] + 4 * q));
          const __m256i products = multiply_quads<Format>(w, x);
          partial[t] = q == begin ? products : _mm256_add_epi16(partial[t], products);
        }
      }
      for (int t = 0; t < kTokens; ++t) sums[t] += pair_dot((I32x8)partial[t], sub);
    }
  }

 private:
  template <class Format>
  static LLMSERVE_INLINE __m256i multiply_quads(__m256i w, __m256i x) {
    if constexpr (kKeepsOffset<Format>) return _mm256_maddubs_epi16(w, x);
    static_assert(kKeepsOffset<Format> || Format::kOffset == 128);
    const __m256i weights = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
  }
};

}  // namespace
}  // namespace llmserve

#include "llmserve/linear_body.h"

namespace llmserve {

const LinearKernels kLinearAvx2 = {quantize, multiply, dequantize_row};

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
