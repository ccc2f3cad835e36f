// Attention for x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "llmserve/attention_tile.h"
#include "llmserve/target_avx2.h"

#define LLMSERVE_AVX2
#include "llmserve/attention_body.h"

namespace llmserve {

const AttentionKernels& attention_kernels_avx2() { return kAttentionKernels; }

}  // namespace llmserve

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
