// Products with float weights: of the activations' type on tensor cores, others in float32.
#include <type_traits>

#include "llmserve/cuda/linear_rows.h"

namespace llmserve::cuda {
namespace {

template <typename W, typename T>
void launch_pair(const LinearArgs& args, Stream stream) {
  if constexpr (std::is_same_v<W, T> && sizeof(W) == 2) {
    launch_float_tiles<T>(args, stream);
  } else {
    launch_float_rows<W, T>(args, stream);
  }
}

}  // namespace

template <typename W>
void launch_float_linear(const LinearArgs& args, Format x_type, Stream stream) {
  if (x_type == Format::BF16) {
    launch_pair<W, bfloat16>(args, stream);
  } else if (x_type == Format::F16) {
    launch_pair<W, half>(args, stream);
  } else {
    launch_pair<W, float>(args, stream);
  }
}

template void launch_float_linear<float>(const LinearArgs&, Format, Stream);
template void launch_float_linear<half>(const LinearArgs&, Format, Stream);
template void launch_float_linear<bfloat16>(const LinearArgs&, Format, Stream);

}  // namespace llmserve::cuda
