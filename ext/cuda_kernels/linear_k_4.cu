// Products with GGUF formats of 4 and 5 bits in blocks of 256.
#include "llmserve/cuda/linear_instances.h"

namespace llmserve::cuda {

LLMSERVE_INSTANTIATE_FORMAT(Q4_K);
LLMSERVE_INSTANTIATE_FORMAT(Q5_K);

}  // namespace llmserve::cuda
