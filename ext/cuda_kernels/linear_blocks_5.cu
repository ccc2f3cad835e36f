// Products with GGUF formats of 5 and 8 bits in blocks of 32.
#include "llmserve/cuda/linear_instances.h"

namespace llmserve::cuda {

LLMSERVE_INSTANTIATE_FORMAT(Q5_0);
LLMSERVE_INSTANTIATE_FORMAT(Q5_1);
LLMSERVE_INSTANTIATE_FORMAT(Q8_0);

}  // namespace llmserve::cuda
