// Attention for any machine: the compiler maps vectors to what is there.
#include "llmserve/attention_body.h"

namespace llmserve {

const AttentionKernels& attention_kernels_portable() { return kAttentionKernels; }

}  // namespace llmserve
