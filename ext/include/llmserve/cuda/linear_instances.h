// The launchers of linear_rows.h for one format, instantiated by the .cu files.
#pragma once

#include "llmserve/cuda/linear_rows.h"

namespace llmserve::cuda {

template <class F>
void launch_linear(const LinearArgs& args, Format x_type, Stream stream) {
  if (x_type == Format::BF16) {
    launch_tiles<F, bfloat16>(args, stream);
  } else if (x_type == Format::F16) {
    launch_tiles<F, half>(args, stream);
  } else {
    launch(&linear_row<F, float>, row_grid(args), Dim3(kRowWarps * kWarpSize), 0, stream, args);
  }
}

template <class F>
void launch_decode(const DecodeArgs& args, Stream stream) {
  const int64_t num_shares =
      args.num_rows * chunks_in_row<F>(args.num_cols) * kLanesInChunk;
  const int64_t num_blocks = ceil_div(num_shares, static_cast<int64_t>(kDecodeThreads));
  launch(&decode_rows<F>, Dim3(static_cast<unsigned>(num_blocks)), Dim3(kDecodeThreads), 0, stream,
         args);
}

}  // namespace llmserve::cuda

#define LLMSERVE_INSTANTIATE_FORMAT(F)                                \
  template void launch_linear<F>(const LinearArgs&, Format, Stream); \
  template void launch_decode<F>(const DecodeArgs&, Stream)
