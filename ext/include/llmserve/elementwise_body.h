// The functions of ElementwiseKernels, included by one source file per instruction set, like
// vec8.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "llmserve/elementwise.h"
#include "llmserve/vec_math.h"

namespace llmserve {
namespace {

constexpr int64_t kSums = 4;

// Calls f(offset, count) for each run of 8 elements and for the rest; count is the run's length.
template <typename F>
inline void for_each_run(int64_t size, F f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, size - i);
}

inline Vec8 load_run(const float* p, int64_t count) {
  return count == kLanes ? load(p) : load_part(p, count);
}

inline void store_run(float* p, Vec8 a, int64_t count) {
  if (count == kLanes) {
    store(p, a);
  } else {
    store_part(p, a, count);
  }
}

float sum_of_squares(const float* x, int64_t size) {
  Vec8 sums[kSums] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kSums * kLanes <= size; i += kSums * kLanes) {
    for (int64_t s = 0; s < kSums; ++s) {
      const Vec8 values = load(x + i + s * kLanes);
      sums[s] = fma(values, values, sums[s]);
    }
  }
  for_each_run(size - i, [&](int64_t offset, int64_t count) {
    const Vec8 values = load_run(x + i + offset, count);
    sums[0] = fma(values, values, sums[0]);
  });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
void rms_norm_row(const RMSNormArgs& args, const float* x, float* residual, float* out) {
  if (residual != nullptr) {
    for_each_run(args.size, [&](int64_t i, int64_t count) {
      store_run(residual + i, load_run(residual + i, count) + load_run(x + i, count), count);
    });
    x = residual;
  }
  const float mean = sum_of_squares(x, args.size) / static_cast<float>(args.size);
  const Vec8 scale = splat(1.0f / std::sqrt(mean + args.eps));
  const Vec8 offset = splat(args.weight_offset);
  for_each_run(args.size, [&](int64_t i, int64_t count) {
    const Vec8 weight = offset + load_run(args.weight + i, count);
    store_run(out + i, load_run(x + i, count) * scale * weight, count);
  });
}

// Su et al., "RoFormer", 2021, arXiv 2104.09864.
void rotate(float* x, const float* cos, const float* sin, int64_t half_dim, bool is_interleaved) {
  if (is_interleaved) {
    for (int64_t i = 0; i < half_dim; ++i) {
      const float even = x[2 * i];
      const float odd = x[2 * i + 1];
      x[2 * i] = even * cos[i] - odd * sin[i];
      x[2 * i + 1] = odd * cos[i] + even * sin[i];
    }
    return;
  }
  for_each_run(half_dim, [&](int64_t i, int64_t count) {
    const Vec8 first = load_run(x + i, count);
    const Vec8 second = load_run(x + half_dim + i, count);
    const Vec8 c = load_run(cos + i, count);
    const Vec8 s = load_run(sin + i, count);
    store_run(x + i, first * c - second * s, count);
    store_run(x + half_dim + i, second * c + first * s, count);
  });
}

template <Vec8 (*kFunction)(Vec8)>
void act_mul_with(const float* gate, const float* up, float* out, int64_t count) {
  for_each_run(count, [&](int64_t i, int64_t run) {
    store_run(out + i, kFunction(load_run(gate + i, run)) * load_run(up + i, run), run);
  });
}

void act_mul_run(const float* gate, const float* up, Activation activation, float* out,
                 int64_t count) {
  switch (activation) {
    case Activation::kGeluTanh: return act_mul_with<gelu_tanh>(gate, up, out, count);
    case Activation::kGelu: return act_mul_with<gelu>(gate, up, out, count);
    default: return act_mul_with<silu>(gate, up, out, count);
  }
}

void softcap_run(float* x, int64_t count, float cap) {
  for_each_run(count, [&](int64_t i, int64_t run) {
    store_run(x + i, softcap(load_run(x + i, run), cap), run);
  });
}

constexpr ElementwiseKernels kElementwiseKernels{rms_norm_row, rotate, act_mul_run, softcap_run};

}  // namespace
}  // namespace llmserve
