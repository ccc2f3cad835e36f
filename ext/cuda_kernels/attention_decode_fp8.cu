// Decoding over an e4m3 cache: products are float16's whatever the type of q and of the output.
#include "llmserve/cuda/attention_decode.h"
#include "llmserve/cuda/attention_launch.h"

namespace llmserve::cuda {

void decode_fp8(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream) {
  launch_decode<half, fp8>(args, max_splits, decode_grid(args, num_blocks_z), stream);
}

}  // namespace llmserve::cuda
