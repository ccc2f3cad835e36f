// Vectors of 256 and 512 bits in the compilers' own notation (GCC's and Clang's vector extensions), so that
// one source becomes AVX2, SSE2 or NEON code. Everything here has internal linkage: each file is
// compiled for its own instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#define LLMSERVE_INLINE inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define LLMSERVE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define LLMSERVE_SHUFFLE_BYTES(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define LLMSERVE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (I32x8){__VA_ARGS__})
#define LLMSERVE_SHUFFLE_BYTES(a, ...) __builtin_shuffle(a, (U8x32){__VA_ARGS__})
#endif

namespace llmserve {
namespace {

using U8x8 = uint8_t __attribute__((vector_size(8)));
using U8x32 = uint8_t __attribute__((vector_size(32)));
using I16x8 = int16_t __attribute__((vector_size(16)));
using U16x8 = uint16_t __attribute__((vector_size(16)));
using I16x16 = int16_t __attribute__((vector_size(32)));
using U16x16 = uint16_t __attribute__((vector_size(32)));
using I32x8 = int32_t __attribute__((vector_size(32)));
using U32x8 = uint32_t __attribute__((vector_size(32)));
using U64x2 = uint64_t __attribute__((vector_size(16)));
using U64x4 = uint64_t __attribute__((vector_size(32)));
using F32x8 = float __attribute__((vector_size(32)));
using U8x64 = uint8_t __attribute__((vector_size(64)));
using U16x32 = uint16_t __attribute__((vector_size(64)));
using I32x16 = int32_t __attribute__((vector_size(64)));
using F32x16 = float __attribute__((vector_size(64)));

template <typename T>
LLMSERVE_INLINE T load(const void* source) {
  T value;
  __builtin_memcpy(&value, source, sizeof(T));
  return value;
}

template <typename T>
LLMSERVE_INLINE void store(void* target, const T& value) {
  __builtin_memcpy(target, &value, sizeof(T));
}

LLMSERVE_INLINE F32x8 broadcast(float value) {
  return F32x8{value, value, value, value, value, value, value, value};
}

LLMSERVE_INLINE I32x8 broadcast(int32_t value) {
  return I32x8{value, value, value, value, value, value, value, value};
}

LLMSERVE_INLINE U8x32 broadcast(uint8_t value) {
  return (U8x32)broadcast(static_cast<int32_t>(value * 0x01010101u));
}

// `value` in each lane of a vector of any width.
template <typename V, typename T>
LLMSERVE_INLINE V splat(T value) {
  return value - V{};
}

LLMSERVE_INLINE F32x8 to_float(I32x8 value) { return __builtin_convertvector(value, F32x8); }
LLMSERVE_INLINE F32x16 to_float(I32x16 value) { return __builtin_convertvector(value, F32x16); }

// The upper bits of each byte: (byte >> kShift) & mask. The mask has to hide what the shift of
// 16-bit units carries over from the neighbour.
template <int kShift>
LLMSERVE_INLINE U8x32 shifted_bits(U8x32 value, uint8_t mask) {
  return (U8x32)((U16x16)value >> kShift) & broadcast(mask);
}

LLMSERVE_INLINE int32_t horizontal_sum(I32x8 v) {
  v += LLMSERVE_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += LLMSERVE_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}

LLMSERVE_INLINE I32x8 max(I32x8 a, I32x8 b) { return a > b ? a : b; }

LLMSERVE_INLINE int32_t horizontal_max(I32x8 v) {
  v = max(v, LLMSERVE_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, LLMSERVE_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return v[0] > v[1] ? v[0] : v[1];
}

// Eight vectors of eight: element j of vector i becomes element i of vector j.
LLMSERVE_INLINE void transpose(I32x8 v[8]) {
  I32x8 a[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = LLMSERVE_SHUFFLE(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = LLMSERVE_SHUFFLE(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  I32x8 b[8];
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = LLMSERVE_SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = LLMSERVE_SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = LLMSERVE_SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[i + 4] = LLMSERVE_SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

}  // namespace
}  // namespace llmserve
