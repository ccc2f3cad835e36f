// Sequences with several queries over a float16 cache.
#include "llmserve/cuda/attention_launch.h"
#include "llmserve/cuda/attention_prefill.h"

namespace llmserve::cuda {

void prefill_float16(const AttentionArgs& args, Stream stream) {
  launch_prefill<half, half>(args, stream);
}

}  // namespace llmserve::cuda
