// Sampling passes for x86-64 with AVX2 and FMA.
#include <cstdint>
#include <cstring>
#include <limits>

#include "llmserve/sampling_passes.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace llmserve {
namespace {
#include "llmserve/sampling_passes_body.h"
}  // namespace

const SamplingPasses& sampling_passes_avx2() {
  static const SamplingPasses passes{chunk_maxima, chunk_weights, count_above};
  return passes;
}

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
