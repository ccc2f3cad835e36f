// What plain C++ may know of CUDA: a stream is a handle that it passes on.
#pragma once

namespace llmserve::cuda {

// A cudaStream_t, as torch.cuda.current_stream().cuda_stream gives it; null under the emulator.
using Stream = void*;

}  // namespace llmserve::cuda
