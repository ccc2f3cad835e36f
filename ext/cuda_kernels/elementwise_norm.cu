// Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467) and the whole step of the
// residual stream around it: post norm, scale, sum, norm. One block per row; the row stays in
// shared memory between the reductions, so that memory sees each value once.
#include "llmserve/cuda/elementwise.h"
#include "llmserve/cuda/row_values.h"

namespace llmserve::cuda {
namespace {

constexpr int kMaxThreads = 512;

LLMSERVE_DEVICE float sum_of_squares(const float (&values)[kGroup]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) sum += values[j] * values[j];
  return sum;
}

// Each thread reads back only those groups of `row` that it wrote: only the sums need barriers.
template <typename In, typename Out>
__global__ void __launch_bounds__(kMaxThreads)
    add_norm_kernel(const AddNormArgs args, const int size, const bool is_vectorized) {
  SharedMemory memory;
  const Shared<float> scratch = memory.take<float>(kWarpSize);
  const Shared<float> row = memory.take<float>(ceil_div(size, kGroup) * kGroup);
  const int64_t token = blockIdx.x / args.num_heads;
  const int64_t head = blockIdx.x % args.num_heads;
  const In* const x = row_of<In>(args.x, token, head);
  float* const residual = row_of<float>(args.residual, token, head);
  Out* const out = row_of<Out>(args.out, token, head);
  const int first = static_cast<int>(threadIdx.x) * kGroup;
  const int step = static_cast<int>(blockDim.x) * kGroup;
  float squares = 0;
  float values[kGroup];
  const auto inverse_rms = [&](float eps) {
    return rsqrtf(block_sum(squares, scratch) / static_cast<float>(size) + eps);
  };

  for (int i = first; i < size; i += step) {
    load_values(x, i, size, is_vectorized, values);
    squares += sum_of_squares(values);
    store_shared(row, i, values);
  }
  if (args.residual.data != nullptr) {
    float factor = 1;
    if (args.post.weight != nullptr) factor = inverse_rms(args.post.eps);
    squares = 0;
    for (int i = first; i < size; i += step) {
      float total[kGroup];
      load_values(residual, i, size, is_vectorized, total);
      load_shared(row, i, values);
      if (args.post.weight != nullptr) {
        apply_norm(args.post, factor, i, size, is_vectorized, values);
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) total[j] += args.scale * values[j];
      squares += sum_of_squares(total);
      store_values(residual, i, size, is_vectorized, total);
      store_shared(row, i, total);
    }
  }
  float factor = 1;
  if (args.norm.weight != nullptr) factor = inverse_rms(args.norm.eps);
  for (int i = first; i < size; i += step) {
    load_shared(row, i, values);
    if (args.norm.weight != nullptr) apply_norm(args.norm, factor, i, size, is_vectorized, values);
    store_values(out, i, size, is_vectorized, values);
  }
}

template <typename In, typename Out>
void launch_add_norm(const AddNormArgs& args, Stream stream) {
  const bool is_vectorized = args.size % kGroup == 0 && is_aligned(args.x) &&
                             is_aligned(args.residual) && is_aligned(args.out) &&
                             is_aligned(args.post.weight) && is_aligned(args.norm.weight);
  const int size = static_cast<int>(args.size);
  const int num_groups = ceil_div(size, kGroup);
  const int num_threads = min(ceil_div(num_groups, kWarpSize) * kWarpSize, kMaxThreads);
  launch(add_norm_kernel<In, Out>, Dim3(static_cast<unsigned>(args.num_tokens * args.num_heads)),
         Dim3(static_cast<unsigned>(num_threads)),
         shared_bytes<float>(kWarpSize) + shared_bytes<float>(num_groups * kGroup), stream, args,
         size, is_vectorized);
}

}  // namespace

void add_norm(const AddNormArgs& args, Stream stream) {
  with_type(args.out.type, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    if (args.x.type == DType::kFloat32) {
      launch_add_norm<float, Out>(args, stream);
    } else {
      launch_add_norm<Out, Out>(args, stream);
    }
  });
}

}  // namespace llmserve::cuda
