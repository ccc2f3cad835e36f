// Eight floats that are worked on at once: an AVX2 register if LLMSERVE_AVX2 is defined, else two
// of the compiler's own vectors of four. Included by one source file per instruction set, after its
// target pragma and after the standard headers; everything is in an unnamed namespace, so that the
// linker cannot mix code of two instruction sets. Both kinds round alike, but for fma, which on a
// machine without the instruction rounds twice.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(LLMSERVE_AVX2)
#include <immintrin.h>
#endif

#include "llmserve/cache_types.h"

namespace llmserve {
namespace {

constexpr int64_t kLanes = 8;

#if defined(LLMSERVE_AVX2)

struct Vec8 {
  __m256 v;
};

inline Vec8 splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec8 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec8 load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline void store(float* p, Vec8 a) { _mm256_storeu_ps(p, a.v); }
// To the nearest, ties to even; beyond the range of float16 its largest number.
inline void store(Half* p, Vec8 a) {
  const __m256 low = _mm256_max_ps(_mm256_set1_ps(-65504.0f), a.v);  // a NaN stays one
  const __m256 clamped = _mm256_min_ps(_mm256_set1_ps(65504.0f), low);
  const __m128i halves = _mm256_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
}
// To the nearest, ties to even.
inline void store(BFloat16* p, Vec8 a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7FFF));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_add_epi32(bits, up), quiet, is_nan);
  const __m256i shorts = _mm256_srli_epi32(rounded, 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(shorts),
                                          _mm256_extracti128_si256(shorts, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

inline Vec8 operator+(Vec8 a, Vec8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec8 operator-(Vec8 a, Vec8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec8 operator*(Vec8 a, Vec8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec8 operator/(Vec8 a, Vec8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec8 fma(Vec8 a, Vec8 b, Vec8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// max and min return b if either is NaN.
inline Vec8 max(Vec8 a, Vec8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec8 min(Vec8 a, Vec8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec8 abs(Vec8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec8 copy_sign(Vec8 magnitude, Vec8 sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.v), _mm256_and_ps(bit, sign.v))};
}
// Per lane a < b ? yes : no.
inline Vec8 select_less(Vec8 a, Vec8 b, Vec8 yes, Vec8 no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
// 2^n, where shifted is n + 1.5 * 2^23 and -126 <= n <= 127.
inline Vec8 power_of_two(Vec8 shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3F800000)))};
}

inline __m128 fold(Vec8 a) {
  return _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
}

// Sums of the lanes of a[0], ..., a[kCount - 1]. Each is added in one order, that of sum().
template <int kCount>
inline void store_sums(float* p, const Vec8* a) {
  if constexpr (kCount == 4) {
    const __m128 low = _mm_hadd_ps(fold(a[0]), fold(a[1]));
    const __m128 high = _mm_hadd_ps(fold(a[2]), fold(a[3]));
    _mm_storeu_ps(p, _mm_hadd_ps(low, high));
  } else if constexpr (kCount == 2) {
    const __m128 pairs = _mm_hadd_ps(fold(a[0]), fold(a[1]));
    _mm_storel_pi(reinterpret_cast<__m64*>(p), _mm_hadd_ps(pairs, pairs));
  } else {
    static_assert(kCount == 1);
    const __m128 pairs = _mm_hadd_ps(fold(a[0]), fold(a[0]));
    _mm_store_ss(p, _mm_hadd_ps(pairs, pairs));
  }
}

#else

using Floats4 = float __attribute__((vector_size(16)));
using Ints4 = int32_t __attribute__((vector_size(16)));
using Shorts4 = uint16_t __attribute__((vector_size(8)));

struct Vec8 {
  Floats4 low, high;
};

inline Floats4 as_floats(Ints4 bits) {
  Floats4 x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline Ints4 as_ints(Floats4 x) {
  Ints4 bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline Ints4 widen(const void* p) {
  Shorts4 shorts;
  std::memcpy(&shorts, p, sizeof(shorts));
  return __builtin_convertvector(shorts, Ints4);
}
// Moves exponent and mantissa into place and multiplies by 2^112, which corrects the bias and is
// exact for subnormal numbers too; an exponent of all ones stays one.
inline Floats4 half_to_floats(Ints4 half) {
  constexpr float kBiasChange = 5.192296858534828e33f;
  const Floats4 magnitude = as_floats((half & 0x7FFF) << 13) * kBiasChange;
  const Ints4 special = ((half & 0x7C00) == 0x7C00) & 0x7F800000;
  return as_floats(as_ints(magnitude) | special | ((half & 0x8000) << 16));
}

inline Vec8 splat(float x) { return {Floats4{} + x, Floats4{} + x}; }
inline Vec8 load(const float* p) {
  Vec8 a;
  std::memcpy(&a.low, p, sizeof(a.low));
  std::memcpy(&a.high, p + 4, sizeof(a.high));
  return a;
}
inline Vec8 load(const Half* p) { return {half_to_floats(widen(p)), half_to_floats(widen(p + 4))}; }
inline Vec8 load(const BFloat16* p) {
  return {as_floats(widen(p) << 16), as_floats(widen(p + 4) << 16)};
}
inline void store(float* p, Vec8 a) {
  std::memcpy(p, &a.low, sizeof(a.low));
  std::memcpy(p + 4, &a.high, sizeof(a.high));
}
// To the nearest, ties to even; beyond the range of float16 its largest number. What is subnormal
// as float16 is rounded by adding 0.5, whose last place is float16's smallest step.
inline uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00 | (magnitude >> 13 & 0x3FF);
  if (magnitude > 0x477FE000) return sign | 0x7BFF;
  if (magnitude < 0x38800000) {
    const float aligned = std::fabs(x) + 0.5f;
    std::memcpy(&bits, &aligned, sizeof(bits));
    return sign | (bits - 0x3F000000);
  }
  return sign | ((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}
inline void store(Half* p, Vec8 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int64_t i = 0; i < kLanes; ++i) p[i].bits = to_half(lanes[i]);
}
// To the nearest, ties to even.
inline void store(BFloat16* p, Vec8 a) {
  uint32_t bits[kLanes];
  std::memcpy(bits, &a, sizeof(bits));
  for (int64_t i = 0; i < kLanes; ++i) {
    const bool is_nan = (bits[i] & 0x7FFFFFFF) > 0x7F800000;
    const uint32_t rounded = bits[i] + 0x7FFF + (bits[i] >> 16 & 1);
    p[i].bits = static_cast<uint16_t>((is_nan ? bits[i] | 0x00400000 : rounded) >> 16);
  }
}

inline Vec8 operator+(Vec8 a, Vec8 b) { return {a.low + b.low, a.high + b.high}; }
inline Vec8 operator-(Vec8 a, Vec8 b) { return {a.low - b.low, a.high - b.high}; }
inline Vec8 operator*(Vec8 a, Vec8 b) { return {a.low * b.low, a.high * b.high}; }
inline Vec8 operator/(Vec8 a, Vec8 b) { return {a.low / b.low, a.high / b.high}; }
inline Floats4 fma(Floats4 a, Floats4 b, Floats4 c) {
#if defined(__FP_FAST_FMAF)
  Floats4 sum;
  for (int i = 0; i < 4; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return sum;
#else
  return a * b + c;
#endif
}
inline Vec8 fma(Vec8 a, Vec8 b, Vec8 c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
// max and min return b if either is NaN.
inline Vec8 max(Vec8 a, Vec8 b) {
  return {a.low > b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}
inline Vec8 min(Vec8 a, Vec8 b) {
  return {a.low < b.low ? a.low : b.low, a.high < b.high ? a.high : b.high};
}
inline Floats4 copy_sign(Floats4 magnitude, Floats4 sign) {
  return as_floats((as_ints(magnitude) & 0x7FFFFFFF) | (as_ints(sign) & ~0x7FFFFFFF));
}
inline Vec8 copy_sign(Vec8 magnitude, Vec8 sign) {
  return {copy_sign(magnitude.low, sign.low), copy_sign(magnitude.high, sign.high)};
}
inline Vec8 abs(Vec8 a) { return copy_sign(a, splat(0.0f)); }
// Per lane a < b ? yes : no.
inline Vec8 select_less(Vec8 a, Vec8 b, Vec8 yes, Vec8 no) {
  return {a.low < b.low ? yes.low : no.low, a.high < b.high ? yes.high : no.high};
}
// 2^n, where shifted is n + 1.5 * 2^23 and -126 <= n <= 127.
inline Vec8 power_of_two(Vec8 shifted) {
  return {as_floats((as_ints(shifted.low) << 23) + 0x3F800000),
          as_floats((as_ints(shifted.high) << 23) + 0x3F800000)};
}

// Sums of the lanes of a[0], ..., a[kCount - 1]. Each is added in one order, that of sum().
template <int kCount>
inline void store_sums(float* p, const Vec8* a) {
  for (int i = 0; i < kCount; ++i) {
    const Floats4 half = a[i].low + a[i].high;
    p[i] = (half[0] + half[1]) + (half[2] + half[3]);
  }
}

#endif

inline Vec8 zero() { return splat(0.0f); }

inline float sum(Vec8 a) {
  float total;
  store_sums<1>(&total, &a);
  return total;
}

inline float max_lane(Vec8 a) {
  float lanes[kLanes];
  store(lanes, a);
  float best = lanes[0];
  for (int64_t i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// The first `count` < 8 values of a row, zeros after them.
template <typename T>
inline Vec8 load_part(const T* p, int64_t count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store_part(T* p, Vec8 a, int64_t count) {
  T lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, count * sizeof(T));
}

}  // namespace
}  // namespace llmserve
