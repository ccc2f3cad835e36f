// Elementwise kernels for any machine: the compiler maps vectors to what is there.
#include "llmserve/elementwise_body.h"

namespace llmserve {

const ElementwiseKernels& elementwise_kernels_portable() { return kElementwiseKernels; }

}  // namespace llmserve
