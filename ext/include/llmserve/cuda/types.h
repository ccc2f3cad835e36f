// Types of tensors in calls of CUDA kernels.
#pragma once

#include <cstdint>

namespace llmserve::cuda {

// Numbered alike in llmserve/kernels/cuda/checks.py.
enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8 = 3 };

}  // namespace llmserve::cuda
