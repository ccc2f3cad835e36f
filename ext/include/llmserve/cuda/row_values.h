// Eight values of a row at a time, between memory and registers. Included by .cu files.
#pragma once

#include <type_traits>

#include "llmserve/cuda/device.h"
#include "llmserve/cuda/elementwise.h"

namespace llmserve::cuda {

constexpr int kGroup = 8;  // values

// Loads kGroup values from a multiple of 16 bytes.
template <typename T>
LLMSERVE_DEVICE void load_group(const T* p, float (&values)[kGroup]) {
  if constexpr (sizeof(T) == 4) {
    float halves[2][4];
    unpack<float>(load16(p), halves[0]);
    unpack<float>(load16(p + 4), halves[1]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = halves[i / 4][i % 4];
  } else {
    unpack<T>(load16(p), values);
  }
}

// float16 beyond its range becomes the largest that it holds; NaN stays NaN.
template <typename T>
LLMSERVE_DEVICE float to_range(float value) {
  if constexpr (std::is_same_v<T, half>) {
    constexpr float kLargest = 65504.0f;
    return value > kLargest ? kLargest : (value < -kLargest ? -kLargest : value);
  }
  return value;
}

// Stores kGroup values at a multiple of 16 bytes, of 8 for fp8.
template <typename T>
LLMSERVE_DEVICE void store_group(T* p, const float (&values)[kGroup]) {
  float in_range[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) in_range[i] = to_range<T>(values[i]);
  if constexpr (sizeof(T) == 4) {
    const float low[4] = {in_range[0], in_range[1], in_range[2], in_range[3]};
    const float high[4] = {in_range[4], in_range[5], in_range[6], in_range[7]};
    store16(p, pack<float>(low));
    store16(p + 4, pack<float>(high));
  } else if constexpr (sizeof(T) == 2) {
    store16(p, pack<T>(in_range));
  } else {
    const uint64_t low = pack_fp8(in_range[0], in_range[1], in_range[2], in_range[3]);
    const uint64_t high = pack_fp8(in_range[4], in_range[5], in_range[6], in_range[7]);
    *reinterpret_cast<uint64_t*>(p) = low | high << 32;
  }
}

// The values i .. i + kGroup - 1 of a row of `size`, i a multiple of kGroup; zeros past its end.
// kVectorized: every row is 16-byte aligned and has whole groups. A template argument, so that
// loads which follow each other are under way together.
template <bool kVectorized, typename T>
LLMSERVE_DEVICE void load_values(const T* row, int i, int size, float (&values)[kGroup]) {
  if constexpr (kVectorized) {
    if (i < size) {
      load_group(row + i, values);
      return;
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = 0.0f;
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = i + j < size ? to_float(row[i + j]) : 0.0f;
  }
}

template <bool kVectorized, typename T>
LLMSERVE_DEVICE void store_values(T* row, int i, int size, const float (&values)[kGroup]) {
  if constexpr (kVectorized) {
    if (i < size) store_group(row + i, values);
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (i + j < size) row[i + j] = from_float<T>(to_range<T>(values[j]));
    }
  }
}

LLMSERVE_DEVICE float sum_of_squares(const float (&values)[kGroup]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) sum += values[j] * values[j];
  return sum;
}

// values *= factor * (offset + weights), the last step of a norm.
LLMSERVE_DEVICE void apply_norm(float factor, float offset, const float (&weights)[kGroup],
                                float (&values)[kGroup]) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) values[j] = values[j] * factor * (offset + weights[j]);
}

LLMSERVE_DEVICE void load_shared(Shared<float> row, int i, float (&values)[kGroup]) {
  float halves[2][4];
  unpack<float>(row.load16(i), halves[0]);
  unpack<float>(row.load16(i + 4), halves[1]);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) values[j] = halves[j / 4][j % 4];
}

LLMSERVE_DEVICE void store_shared(Shared<float> row, int i, const float (&values)[kGroup]) {
  const float low[4] = {values[0], values[1], values[2], values[3]};
  const float high[4] = {values[4], values[5], values[6], values[7]};
  row.store16(i, pack<float>(low));
  row.store16(i + 4, pack<float>(high));
}

template <typename T>
LLMSERVE_DEVICE T* row_of(const Rows& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

inline int64_t size_of(DType type) {
  return type == DType::kFloat32 ? 4 : type == DType::kFloat8 ? 1 : 2;
}

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether every row begins at a multiple of 16 bytes.
inline bool is_aligned(const Rows& rows) {
  if (rows.data == nullptr) return true;
  const int64_t item = size_of(rows.type);
  return is_aligned(rows.data) && rows.token_stride * item % 16 == 0 &&
         rows.head_stride * item % 16 == 0;
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>()) for an activation's type.
template <typename F>
void with_type(DType type, const F& f) {
  switch (type) {
    case DType::kFloat32:
      return f(TypeTag<float>());
    case DType::kFloat16:
      return f(TypeTag<half>());
    default:
      return f(TypeTag<bfloat16>());
  }
}

// Calls f(std::true_type()) or f(std::false_type()).
template <typename F>
void with_flag(bool flag, const F& f) {
  if (flag) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

}  // namespace llmserve::cuda
