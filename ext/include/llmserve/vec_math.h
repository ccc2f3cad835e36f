// Functions of eight floats that kernels share. Included like vec8.h. The polynomials are minimax
// fits made for this file; the error bounds are those of the fit, to which rounding adds about one
// unit in the last place. NaN in, NaN out.
#pragma once

#include "llmserve/vec8.h"

namespace llmserve {
namespace {

// e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2 and e^r = 1 + r + r^2 * p(r), good to
// 3e-9. ln 2 comes in two parts, so that n * ln 2 is exact enough. Zero below -87.33, where floats
// become subnormal; stays at 2.4e38 above 88.37.
inline Vec8 exp(Vec8 x) {
  const Vec8 lowest = splat(-87.33f);
  const Vec8 clamped = min(splat(88.37f), max(lowest, x));
  const Vec8 rounding = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec8 shifted = fma(clamped, splat(1.44269504f), rounding);
  const Vec8 n = shifted - rounding;
  const Vec8 r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), clamped));
  Vec8 p = splat(1.38145383e-3f);
  p = fma(p, r, splat(8.36874545e-3f));
  p = fma(p, r, splat(4.16683890e-2f));
  p = fma(p, r, splat(1.66665211e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + splat(1.0f);
  return select_less(x, lowest, zero(), p * power_of_two(shifted));
}

inline float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

// x + x^3 * p(x^2), good to 4e-9, up to 0.625, and 1 - 2 / (e^2x + 1) above.
inline Vec8 tanh(Vec8 x) {
  const Vec8 magnitude = abs(x);
  const Vec8 square = x * x;
  Vec8 p = splat(-5.71703678e-3f);
  p = fma(p, square, splat(2.06505787e-2f));
  p = fma(p, square, splat(-5.37434965e-2f));
  p = fma(p, square, splat(1.33314908e-1f));
  p = fma(p, square, splat(-3.33332837e-1f));
  const Vec8 small = fma(p * square, magnitude, magnitude);
  const Vec8 two = splat(2.0f);
  const Vec8 large = splat(1.0f) - two / (exp(two * magnitude) + splat(1.0f));
  return copy_sign(select_less(magnitude, splat(0.625f), small, large), x);
}

inline Vec8 softcap(Vec8 x, float cap) { return splat(cap) * tanh(x / splat(cap)); }

// x * sigmoid(x)
inline Vec8 silu(Vec8 x) { return x / (splat(1.0f) + exp(zero() - x)); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2u).
// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, arXiv 1606.08415.
inline Vec8 gelu_tanh(Vec8 x) {
  const Vec8 inner = fma(x * x, splat(-0.0713548163f), splat(-1.59576912f));
  return x / (splat(1.0f) + exp(x * inner));
}

// x * Phi(x). With y = |x| / sqrt(2), erfc(y) = t * p(t) * e^(-y^2) where t = 1 / (1 + 0.4 y): the
// form of Abramowitz and Stegun 7.1.26 with more terms, good to 7e-9 up to y = 9.5.
inline Vec8 gelu(Vec8 x) {
  const Vec8 one = splat(1.0f);
  const Vec8 t = one / fma(abs(x), splat(0.282842712f), one);
  Vec8 p = splat(-3.05953324e-2f);
  p = fma(p, t, splat(2.03475177e-1f));
  p = fma(p, t, splat(-5.11723101e-1f));
  p = fma(p, t, splat(5.64756364e-1f));
  p = fma(p, t, splat(-2.98869014e-1f));
  p = fma(p, t, splat(2.79909283e-1f));
  p = fma(p, t, splat(1.26945212e-1f));
  p = fma(p, t, splat(2.15510651e-1f));
  p = fma(p, t, splat(2.24880069e-1f));
  p = fma(p, t, splat(2.25710660e-1f));
  const Vec8 tail = splat(0.5f) * (t * p * exp(x * x * splat(-0.5f)));
  return x * select_less(x, zero(), tail, one - tail);
}

}  // namespace
}  // namespace llmserve
