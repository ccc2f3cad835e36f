// Sequences with several queries over a e4m3 cache.
#include "llmserve/cuda/attention_launch.h"
#include "llmserve/cuda/attention_prefill.h"

namespace llmserve::cuda {

void prefill_fp8(const AttentionArgs& args, Stream stream) {
  launch_prefill<half, fp8>(args, stream);
}

}  // namespace llmserve::cuda
