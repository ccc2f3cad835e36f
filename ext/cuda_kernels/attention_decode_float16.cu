// Decoding over a float16 cache, a type to a file as nvcc takes long over each.
#include "llmserve/cuda/attention_decode.h"
#include "llmserve/cuda/attention_launch.h"

namespace llmserve::cuda {

void decode_float16(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream) {
  launch_decode<half, half>(args, max_splits, decode_grid(args, num_blocks_z), stream);
}

}  // namespace llmserve::cuda
