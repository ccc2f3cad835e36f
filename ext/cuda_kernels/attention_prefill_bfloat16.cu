// Sequences with several queries over a bfloat16 cache.
#include "llmserve/cuda/attention_launch.h"
#include "llmserve/cuda/attention_prefill.h"

namespace llmserve::cuda {

void prefill_bfloat16(const AttentionArgs& args, Stream stream) {
  launch_prefill<bfloat16, bfloat16>(args, stream);
}

}  // namespace llmserve::cuda
