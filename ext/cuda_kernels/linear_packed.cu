// Products with the formats of AWQ, GPTQ, int8 and fp8 checkpoints.
#include "llmserve/cuda/linear_instances.h"

namespace llmserve::cuda {

LLMSERVE_INSTANTIATE_FORMAT(INT4_ROW);
LLMSERVE_INSTANTIATE_FORMAT(INT4_32);
LLMSERVE_INSTANTIATE_FORMAT(INT8_ROW);
LLMSERVE_INSTANTIATE_FORMAT(FP8_ROW);

}  // namespace llmserve::cuda
