// Attention for x86-64 with AVX2, FMA and F16C.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "llmserve/attention_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LLMSERVE_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "llmserve/attention_body.h"

namespace llmserve {

const AttentionKernels& attention_kernels_avx2() { return kAttentionKernels; }

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
