// What lies between the projections and the attention of a layer: norm of each head of q and k,
// rotary embedding (Su et al. 2021, arXiv 2104.09864), and K and V into their slots of the paged
// cache. One launch; q, k and v are read once.
//
// A head is the work of a few neighbouring lanes, eight values each. The values are in shared
// memory as well, where every lane finds the partners of its own.
#include "llmserve/cuda/elementwise.h"
#include "llmserve/cuda/row_values.h"

namespace llmserve::cuda {
namespace {

constexpr int kNumThreads = 128;
static_assert(kMaxHeadDim == kWarpSize * kGroup, "a warp holds a head");

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

// Which values of a head are rotated with which, and by which angle of the position's row.
struct Rotation {
  int half_dim;
  bool is_interleaved;
  // Whether each group pairs with one group, and its angles lie side by side.
  bool has_whole_groups;

  LLMSERVE_DEVICE bool is_first(int at) const {
    return is_interleaved ? at % 2 == 0 : at < half_dim;
  }
  LLMSERVE_DEVICE int partner(int at) const {
    const int distance = is_interleaved ? 1 : half_dim;
    return is_first(at) ? at + distance : at - distance;
  }
  LLMSERVE_DEVICE int pair(int at) const { return is_interleaved ? at / 2 : at % half_dim; }

  // The group's values of one row of cos or sin; zeros for values that are not rotated.
  LLMSERVE_DEVICE void load_angles(const float* row, int i, float (&angles)[kGroup]) const {
    if (has_whole_groups) {
      load_group(row + pair(i), angles);
      return;
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) angles[j] = i + j < 2 * half_dim ? row[pair(i + j)] : 0.0f;
  }

  LLMSERVE_DEVICE void apply(Shared<float> values, int i, const float (&cos)[kGroup],
                             const float (&sin)[kGroup], float (&rotated)[kGroup]) const {
    float partners[kGroup];
    if (has_whole_groups) load_shared(values, partner(i), partners);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int at = i + j;
      if (!has_whole_groups) {
        if (at >= 2 * half_dim) continue;
        partners[j] = values[partner(at)];
      }
      const float turned = partners[j] * sin[j];
      rotated[j] = rotated[j] * cos[j] + (is_first(at) ? -turned : turned);
    }
  }
};

template <typename T, typename Cached, bool kVectorized>
__global__ void __launch_bounds__(kNumThreads)
    rotate_and_write_kernel(const RotateAndWriteArgs args, const int lanes_per_head) {
  LLMSERVE_SHARED(float, all_values, kNumThreads * kGroup);
  const int head_dim = static_cast<int>(args.head_dim);
  const int thread = static_cast<int>(threadIdx.x);
  const int first_of_head = thread / lanes_per_head * lanes_per_head;
  const Shared<float> values = all_values + first_of_head * kGroup;
  const int i = (thread - first_of_head) * kGroup;

  const int64_t heads_per_token = num_heads_per_token(args);
  const int heads_per_block = kNumThreads / lanes_per_head;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * heads_per_block + thread / lanes_per_head;
  const bool is_inside = item < args.num_tokens * heads_per_token && i < head_dim;
  const int64_t token = is_inside ? item / heads_per_token : 0;
  const Head<T> head = find_head<T>(args, token, is_inside ? item % heads_per_token : 0);
  const Rotation rotation{
      static_cast<int>(args.half_dim), args.is_interleaved,
      kVectorized && !args.is_interleaved && static_cast<int>(args.half_dim) % kGroup == 0};
  const bool is_rotated = is_inside && head.is_rotated && i < 2 * rotation.half_dim;

  // All loads before the first use.
  float group[kGroup] = {}, weights[kGroup] = {}, cos[kGroup] = {}, sin[kGroup] = {};
  int64_t slot = -1;
  if (is_inside) {
    load_values<kVectorized>(head.source, i, head_dim, group);
    if (head.norm.weight != nullptr) {
      load_values<kVectorized>(head.norm.weight, i, head_dim, weights);
    }
    if (head.cache.data != nullptr) slot = args.slots[token];
  }
  if (is_rotated) {
    const int64_t last = args.max_positions - 1;
    const int64_t row = min(max<int64_t>(args.positions[token], 0), last) * rotation.half_dim;
    rotation.load_angles(args.cos + row, i, cos);
    rotation.load_angles(args.sin + row, i, sin);
  }

  float squares = sum_of_squares(group);
  for (int mask = lanes_per_head / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
  if (head.norm.weight != nullptr) {
    const float factor = rsqrtf(squares / static_cast<float>(head_dim) + head.norm.eps);
    apply_norm(factor, head.norm.offset, weights, group);
  }
  store_shared(values, i, group);
  warp_sync();
  if (!is_inside) return;

  if (is_rotated) rotation.apply(values, i, cos, sin, group);
  if (head.target != nullptr) store_values<kVectorized>(head.target, i, head_dim, group);
  if (slot < 0 || slot >= args.num_blocks * args.block_size) return;
  if (head.cache.scales != nullptr) {
    const float scale = head.cache.scales[head.kv_head];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) group[j] /= scale;
  }
  const int64_t row = slot % args.block_size * args.num_kv_heads + head.kv_head;
  Cached* const block =
      static_cast<Cached*>(head.cache.data) + slot / args.block_size * head.cache.block_stride;
  store_values<kVectorized>(block + row * head_dim, i, head_dim, group);
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
  int lanes_per_head = 1;
  while (lanes_per_head * kGroup < args.head_dim) lanes_per_head *= 2;
  const int64_t num_heads = args.num_tokens * num_heads_per_token(args);
  const int64_t num_blocks = ceil_div<int64_t>(num_heads, kNumThreads / lanes_per_head);
  with_flag(is_vectorized, [&](auto flag) {
    launch(rotate_and_write_kernel<T, Cached, decltype(flag)::value>,
           Dim3(static_cast<unsigned>(num_blocks)), Dim3(kNumThreads), 0, stream, args,
           lanes_per_head);
  });
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
