// Elementwise kernels for x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "llmserve/elementwise.h"
#include "llmserve/target_avx2.h"

#define LLMSERVE_AVX2
#include "llmserve/elementwise_body.h"

namespace llmserve {

const ElementwiseKernels& elementwise_kernels_avx2() { return kElementwiseKernels; }

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
