// The functions of SamplingPasses, included by one source file per instruction set, like vec8.h.
#pragma once

#include <limits>

#include "llmserve/sampling_passes.h"
#include "llmserve/vec_math.h"

namespace llmserve {
namespace {

bool chunk_maxima(const float* logits, int64_t num_chunks, float* maxima) {
  const Vec8 infinity = splat(std::numeric_limits<float>::infinity());
  const Vec8 one = splat(1.0f);
  Vec8 is_bad = zero();
  for (int64_t c = 0; c < num_chunks; ++c) {
    Vec8 best = zero() - infinity;
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      const Vec8 x = load(logits + c * kChunk + i);
      is_bad = select_less(x, infinity, is_bad, one);
      best = max(x, best);  // best, if x is NaN
    }
    maxima[c] = max_lane(best);
  }
  return sum(is_bad) > 0;
}

double chunk_weights(const float* logits, float max, float inv_temperature, float threshold,
                     float* weights) {
  using Floats4 = float __attribute__((vector_size(16)));
  using Doubles4 = double __attribute__((vector_size(32)));
  Doubles4 sums[2] = {};
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    const Vec8 x = load(logits + i);
    const Vec8 weight = exp((x - splat(max)) * splat(inv_temperature));
    store(weights + i, select_less(x, splat(threshold), zero(), weight));
    Floats4 halves[2];
    std::memcpy(halves, weights + i, sizeof(halves));
    sums[0] += __builtin_convertvector(halves[0], Doubles4);
    sums[1] += __builtin_convertvector(halves[1], Doubles4);
  }
  const Doubles4 total = sums[0] + sums[1];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

int64_t count_above(const float* logits, float value) {
  Vec8 count = zero();
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    count = count + select_less(splat(value), load(logits + i), splat(1.0f), zero());
  }
  return static_cast<int64_t>(sum(count));
}

constexpr SamplingPasses kPasses{chunk_maxima, chunk_weights, count_above};

}  // namespace
}  // namespace llmserve
