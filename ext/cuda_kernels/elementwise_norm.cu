// Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467) and the whole step of the
// residual stream around it: post norm, scale, sum, norm. One block per row; each thread keeps its
// groups of the row in registers, so that memory sees each value once.
#include "llmserve/cuda/elementwise.h"
#include "llmserve/cuda/row_values.h"

namespace llmserve::cuda {
namespace {

constexpr int kMaxThreads = 1024;

// The thread's group g is at (threadIdx.x + g * blockDim.x) * kGroup. Where it has one only, all
// that is needed is loaded before the first barrier, so that one wait serves all loads.
template <typename In, typename Out, int kGroups, bool kVectorized>
__global__ void __launch_bounds__(kMaxThreads)
    add_norm_kernel(const AddNormArgs args, const int size) {
  constexpr bool kIsLoadedAhead = kGroups == 1;
  LLMSERVE_SHARED(float, scratch, kWarpSize);
  const int64_t token = blockIdx.x / args.num_heads;
  const int64_t head = blockIdx.x % args.num_heads;
  const In* const x = row_of<In>(args.x, token, head);
  float* const residual = row_of<float>(args.residual, token, head);
  Out* const out = row_of<Out>(args.out, token, head);
  const bool has_residual = args.residual.data != nullptr;
  const bool has_post = args.post.weight != nullptr;
  const bool has_norm = args.norm.weight != nullptr;
  const auto place = [&](int g) {
    return (static_cast<int>(threadIdx.x) + g * static_cast<int>(blockDim.x)) * kGroup;
  };
  const auto inverse_rms = [&](float squares, float eps) {
    return rsqrtf(block_sum(squares, scratch) / static_cast<float>(size) + eps);
  };

  float row[kGroups][kGroup];
  float total[kGroup] = {}, post_weights[kGroup] = {}, weights[kGroup] = {};
  float squares = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) load_values<kVectorized>(x, place(g), size, row[g]);
  if (kIsLoadedAhead) {
    if (has_residual) load_values<kVectorized>(residual, place(0), size, total);
    if (has_post) load_values<kVectorized>(args.post.weight, place(0), size, post_weights);
    if (has_norm) load_values<kVectorized>(args.norm.weight, place(0), size, weights);
  }

#pragma unroll
  for (int g = 0; g < kGroups; ++g) squares += sum_of_squares(row[g]);
  if (has_residual) {
    const float factor = has_post ? inverse_rms(squares, args.post.eps) : 1.0f;
    squares = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (has_post) {
        if (!kIsLoadedAhead) {
          load_values<kVectorized>(args.post.weight, place(g), size, post_weights);
        }
        apply_norm(factor, args.post.offset, post_weights, row[g]);
      }
      if (!kIsLoadedAhead) load_values<kVectorized>(residual, place(g), size, total);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) row[g][j] = total[j] + args.scale * row[g][j];
      squares += sum_of_squares(row[g]);
      store_values<kVectorized>(residual, place(g), size, row[g]);
    }
  }
  const float factor = has_norm ? inverse_rms(squares, args.norm.eps) : 1.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (has_norm) {
      if (!kIsLoadedAhead) load_values<kVectorized>(args.norm.weight, place(g), size, weights);
      apply_norm(factor, args.norm.offset, weights, row[g]);
    }
    store_values<kVectorized>(out, place(g), size, row[g]);
  }
}

template <typename In, typename Out, int kGroups, bool kVectorized>
void launch_add_norm(const AddNormArgs& args, Stream stream) {
  const int size = static_cast<int>(args.size);
  const int groups_per_thread = ceil_div(ceil_div(size, kGroup), kGroups);
  const int num_threads = ceil_div(groups_per_thread, kWarpSize) * kWarpSize;
  launch(add_norm_kernel<In, Out, kGroups, kVectorized>,
         Dim3(static_cast<unsigned>(args.num_tokens * args.num_heads)),
         Dim3(static_cast<unsigned>(num_threads)), 0, stream, args, size);
}

template <typename In, typename Out>
void launch_add_norm(const AddNormArgs& args, Stream stream) {
  const bool is_vectorized = args.size % kGroup == 0 && is_aligned(args.x) &&
                             is_aligned(args.residual) && is_aligned(args.out) &&
                             is_aligned(args.post.weight) && is_aligned(args.norm.weight);
  if (!is_vectorized) return launch_add_norm<In, Out, 4, false>(args, stream);
  if (args.size <= kMaxThreads * kGroup) return launch_add_norm<In, Out, 1, true>(args, stream);
  launch_add_norm<In, Out, 4, true>(args, stream);
}

static_assert(kMaxNormSize == 4 * kMaxThreads * kGroup, "four groups per thread are enough");

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
