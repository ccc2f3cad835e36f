// Elementwise kernels for x86-64 with AVX2, FMA and F16C.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "llmserve/elementwise.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LLMSERVE_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "llmserve/elementwise_body.h"

namespace llmserve {

const ElementwiseKernels& elementwise_kernels_avx2() { return kElementwiseKernels; }

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
