// Sampling passes for x86-64 with AVX2 and FMA.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>

#define LLMSERVE_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "llmserve/sampling_passes_body.h"

const llmserve::SamplingPasses& llmserve::sampling_passes_avx2() { return kPasses; }

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
