// Products with GGUF formats whose half groups have scales.
#include "llmserve/cuda/linear_instances.h"

namespace llmserve::cuda {

LLMSERVE_INSTANTIATE_FORMAT(Q6_K);
LLMSERVE_INSTANTIATE_FORMAT(Q3_K);
LLMSERVE_INSTANTIATE_FORMAT(Q2_K);

}  // namespace llmserve::cuda
