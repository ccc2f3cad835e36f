// Products with GGUF formats of 4 bits in blocks of 32.
#include "llmserve/cuda/linear_instances.h"

namespace llmserve::cuda {

LLMSERVE_INSTANTIATE_FORMAT(Q4_0);
LLMSERVE_INSTANTIATE_FORMAT(Q4_1);

}  // namespace llmserve::cuda
