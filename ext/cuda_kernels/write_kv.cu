// What lies between the projections and the attention of a layer: norm of each head of q and k,
// rotary embedding (Su et al. 2021, arXiv 2104.09864), and K and V into their slots of the paged
// cache. One launch; q, k and v are read once.
//
// A head is the work of a few lanes, a group of eight values each. The values wait in shared
// memory, where every lane finds the partners of its own.
#include "llmserve/cuda/elementwise.h"
#include "llmserve/cuda/row_values.h"

namespace llmserve::cuda {
namespace {

constexpr int kNumThreads = 128;

// Sum over `num_lanes` neighbouring lanes, a power of two.
LLMSERVE_DEVICE float sum_of_lanes(float value, int num_lanes) {
  for (int mask = num_lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// Where one head comes from, what is done to it and where it goes.
template <typename T>
struct Head {
  const T* source;
  T* target;  // null: nowhere
  Norm norm;
  bool is_rotated;
  KVCache cache;
  int kv_head;
};

LLMSERVE_BOTH int64_t num_heads_per_token(const RotateAndWriteArgs& args) {
  return args.num_heads + args.num_kv_heads * (args.v.data == nullptr ? 1 : 2);
}

// Heads of a token in the order q, k, v.
template <typename T>
LLMSERVE_DEVICE Head<T> find_head(const RotateAndWriteArgs& args, int64_t token, int64_t index) {
  const bool is_rotated = args.cos != nullptr;
  if (index < args.num_heads) {
    return {row_of<T>(args.q, token, index), row_of<T>(args.q_out, token, index), args.q_norm,
            is_rotated, KVCache{}, 0};
  }
  index -= args.num_heads;
  if (index < args.num_kv_heads) {
    T* const target = args.k_out.data == nullptr ? nullptr : row_of<T>(args.k_out, token, index);
    return {row_of<T>(args.k, token, index), target, args.k_norm, is_rotated, args.k_cache,
            static_cast<int>(index)};
  }
  index -= args.num_kv_heads;
  return {row_of<T>(args.v, token, index), nullptr, Norm{}, false, args.v_cache,
          static_cast<int>(index)};
}

// The kGroup values at i of the head in `values`, rotated. cos and sin: the token's rows.
LLMSERVE_DEVICE void rotate(Shared<float> values, int i, const float* cos, const float* sin,
                            int half_dim, bool is_interleaved, bool is_vectorized,
                            float (&rotated)[kGroup]) {
  if (is_vectorized && !is_interleaved && half_dim % kGroup == 0) {
    const bool is_first = i < half_dim;
    float partners[kGroup], cosines[kGroup], sines[kGroup];
    load_shared(values, is_first ? i + half_dim : i - half_dim, partners);
    load_group(cos + i % half_dim, cosines);
    load_group(sin + i % half_dim, sines);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float turned = partners[j] * sines[j];
      rotated[j] = rotated[j] * cosines[j] + (is_first ? -turned : turned);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    const int at = i + j;
    if (at >= 2 * half_dim) continue;
    const bool is_first = is_interleaved ? at % 2 == 0 : at < half_dim;
    const int distance = is_interleaved ? 1 : half_dim;
    const int pair = is_interleaved ? at / 2 : at % half_dim;
    const float turned = values[is_first ? at + distance : at - distance] * sin[pair];
    rotated[j] = rotated[j] * cos[pair] + (is_first ? -turned : turned);
  }
}

template <typename T, typename Cached>
__global__ void __launch_bounds__(kNumThreads)
    rotate_and_write_kernel(const RotateAndWriteArgs args, const int lanes_per_head,
                            const bool is_vectorized) {
  const int head_dim = static_cast<int>(args.head_dim);
  const int half_dim = static_cast<int>(args.half_dim);
  const int row_size = ceil_div(head_dim, kGroup) * kGroup;
  const int group = static_cast<int>(threadIdx.x) / lanes_per_head;
  const int heads_per_block = static_cast<int>(blockDim.x) / lanes_per_head;
  SharedMemory memory;
  const Shared<float> values = memory.take<float>(heads_per_block * row_size) + group * row_size;

  const int64_t heads_per_token = num_heads_per_token(args);
  const int64_t item = static_cast<int64_t>(blockIdx.x) * heads_per_block + group;
  const bool is_inside = item < args.num_tokens * heads_per_token;
  const int64_t token = is_inside ? item / heads_per_token : 0;
  const Head<T> head = find_head<T>(args, token, is_inside ? item % heads_per_token : 0);
  const int first = static_cast<int>(threadIdx.x) % lanes_per_head * kGroup;
  const int end = is_inside ? head_dim : 0;
  const int step = lanes_per_head * kGroup;

  float squares = 0;
  float group_values[kGroup];
  for (int i = first; i < end; i += step) {
    load_values(head.source, i, head_dim, is_vectorized, group_values);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) squares += group_values[j] * group_values[j];
    store_shared(values, i, group_values);
  }
  squares = sum_of_lanes(squares, lanes_per_head);
  if (head.norm.weight != nullptr) {
    const float factor = rsqrtf(squares / static_cast<float>(head_dim) + head.norm.eps);
    for (int i = first; i < end; i += step) {
      load_shared(values, i, group_values);
      apply_norm(head.norm, factor, i, head_dim, is_vectorized, group_values);
      store_shared(values, i, group_values);
    }
  }
  warp_sync();
  if (!is_inside) return;

  const float* cos = nullptr;
  const float* sin = nullptr;
  if (head.is_rotated) {
    const int64_t last = args.max_positions - 1;
    const int64_t position = min(max<int64_t>(args.positions[token], 0), last);
    cos = args.cos + position * half_dim;
    sin = args.sin + position * half_dim;
  }
  Cached* cached = nullptr;
  const float* scale = nullptr;
  if (head.cache.data != nullptr) {
    const int64_t slot = args.slots[token];
    if (slot >= 0 && slot < args.num_blocks * args.block_size) {
      const int64_t row = slot % args.block_size * args.num_kv_heads + head.kv_head;
      cached = static_cast<Cached*>(head.cache.data) +
               slot / args.block_size * head.cache.block_stride + row * head_dim;
      if (head.cache.scales != nullptr) scale = head.cache.scales + head.kv_head;
    }
  }
  for (int i = first; i < head_dim; i += step) {
    load_shared(values, i, group_values);
    if (head.is_rotated && i < 2 * half_dim) {
      rotate(values, i, cos, sin, half_dim, args.is_interleaved, is_vectorized, group_values);
    }
    if (head.target != nullptr) {
      store_values(head.target, i, head_dim, is_vectorized, group_values);
    }
    if (cached != nullptr) {
      if (scale != nullptr) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) group_values[j] /= *scale;
      }
      store_values(cached, i, head_dim, is_vectorized, group_values);
    }
  }
}

bool is_cache_aligned(const KVCache& cache, DType type) {
  return is_aligned(cache.data) && cache.block_stride * size_of(type) % 16 == 0;
}

template <typename T, typename Cached>
void launch_rotate_and_write(const RotateAndWriteArgs& args, Stream stream) {
  const bool is_vectorized =
      args.head_dim % kGroup == 0 && is_aligned(args.q) && is_aligned(args.q_out) &&
      is_aligned(args.k) && is_aligned(args.v) && is_aligned(args.k_out) &&
      is_aligned(args.q_norm.weight) && is_aligned(args.k_norm.weight) && is_aligned(args.cos) &&
      is_aligned(args.sin) && is_cache_aligned(args.k_cache, args.cache_type) &&
      is_cache_aligned(args.v_cache, args.cache_type);
  const int num_groups = static_cast<int>(ceil_div<int64_t>(args.head_dim, kGroup));
  int lanes_per_head = 1;
  while (lanes_per_head < num_groups && lanes_per_head < kWarpSize) lanes_per_head *= 2;
  const int heads_per_block = kNumThreads / lanes_per_head;
  const int64_t num_heads = args.num_tokens * num_heads_per_token(args);
  launch(rotate_and_write_kernel<T, Cached>,
         Dim3(static_cast<unsigned>(ceil_div<int64_t>(num_heads, heads_per_block))),
         Dim3(kNumThreads), shared_bytes<float>(heads_per_block * num_groups * kGroup), stream,
         args, lanes_per_head, is_vectorized);
}

}  // namespace

void rotate_and_write(const RotateAndWriteArgs& args, Stream stream) {
  with_type(args.q.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.cache_type == DType::kFloat8) return launch_rotate_and_write<T, fp8>(args, stream);
    with_type(args.cache_type, [&](auto cache_tag) {
      launch_rotate_and_write<T, typename decltype(cache_tag)::type>(args, stream);
    });
  });
}

}  // namespace llmserve::cuda
