// The 16-bit and 8-bit floats of the emulator: storage types with the conversions of CUDA, to nearest
// even, subnormals included. A NaN becomes the one quiet NaN that the conversion instructions give.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace llmserve::cuda {

struct half {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct fp8 {  // e4m3: no infinity, 448 is the largest
  uint8_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(bfloat16 value) { return bits_to_float(uint32_t{value.bits} << 16); }

inline float to_float(half value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  if (magnitude < 0x0400u) {  // zero and subnormals: multiples of 2^-24
    return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 0x1p-24f));
  }
  const uint32_t bias = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;  // infinity and NaN
  return bits_to_float(sign | ((magnitude << 13) + bias));
}

inline float to_float(fp8 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t sign = (value.bits & 0x80u) << 24;
  if (magnitude == 0x7fu) return bits_to_float(0x7fffffffu);
  if (magnitude < 0x08u) {  // zero and subnormals: multiples of 2^-9
    return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 0x1p-9f));
  }
  return bits_to_float(sign | ((magnitude << 20) + (120u << 23)));
}

// Drops `count` low bits of `bits`, to nearest even.
inline uint32_t round_off(uint32_t bits, int count) {
  return (bits + ((1u << (count - 1)) - 1) + (bits >> count & 1)) >> count;
}

// |value| in multiples of `unit` (a power of two), to nearest even: the sum's last bit is one unit.
inline uint32_t in_units(float magnitude, float unit) {
  const float one = unit * 0x1p23f;
  return float_to_bits(magnitude + one) - float_to_bits(one);
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bfloat16 from_float<bfloat16>(float value) {
  if (value != value) return {0x7fff};
  return {static_cast<uint16_t>(round_off(float_to_bits(value), 16))};
}

template <>
inline half from_float<half>(float value) {
  if (value != value) return {0x7fff};
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude < 113u << 23) {  // below 2^-14
    rounded = in_units(bits_to_float(magnitude), 0x1p-24f);
  } else if (magnitude >= 143u << 23) {  // 65536 and more
    rounded = 0x7c00u;
  } else {
    rounded = round_off(magnitude, 13) - (112u << 10);  // 65520 carries into infinity by itself
  }
  return {static_cast<uint16_t>(sign | rounded)};
}

template <>
inline fp8 from_float<fp8>(float value) {
  if (value != value) return {0x7f};
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude < 121u << 23) {  // below 2^-6
    rounded = in_units(bits_to_float(magnitude), 0x1p-9f);
  } else if (magnitude >= 136u << 23) {  // 512 and more
    rounded = 0x7eu;
  } else {
    rounded = round_off(magnitude, 20) - (120u << 3);
    if (rounded > 0x7eu) rounded = 0x7eu;
  }
  return {static_cast<uint8_t>(sign | rounded)};
}

template <typename T>
uint32_t pack_pair(float low, float high) {
  return uint32_t{from_float<T>(low).bits} | uint32_t{from_float<T>(high).bits} << 16;
}

template <typename T>
void unpack_pair(uint32_t word, float& low, float& high) {
  low = to_float(T{static_cast<uint16_t>(word)});
  high = to_float(T{static_cast<uint16_t>(word >> 16)});
}

inline uint32_t pack_fp8(float a, float b, float c, float d) {
  return uint32_t{from_float<fp8>(a).bits} | uint32_t{from_float<fp8>(b).bits} << 8 |
         uint32_t{from_float<fp8>(c).bits} << 16 | uint32_t{from_float<fp8>(d).bits} << 24;
}

inline void unpack_fp8(uint32_t word, float (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = to_float(fp8{static_cast<uint8_t>(word >> 8 * i)});
}

// The approximate instructions flush subnormal results (and operands of a logarithm) to zero.
inline float fast_exp2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float fast_log2(float x) { return std::fabs(x) < 0x1p-126f ? -INFINITY : std::log2(x); }

// __fdividef gives 0 for divisors beyond 2^126.
inline float fast_divide(float a, float b) {
  const float magnitude = std::fabs(b);
  return magnitude > 0x1p126f && magnitude < INFINITY ? a * 0.0f : a / b;
}

// Compiled without contraction, like all that is emulated.
inline float multiply(float a, float b) { return a * b; }

inline int dot4(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  }
  return c;
}

inline uint32_t mul_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

inline int popcount(uint32_t x) { return __builtin_popcount(x); }

inline int leading_zeros(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }

// prmt: nibble i of the selector chooses byte i of the result from the eight bytes of (b, a); its
// high bit repeats that byte's sign bit.
inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> 4 * i & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (choice & 7)) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

}  // namespace llmserve::cuda

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
