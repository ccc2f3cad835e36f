// Attention in float32 arithmetic, without tensor cores: for float32 queries or caches, for types
// that differ, and for any head_dim. A block has one query and up to eight heads that share a KV
// head; a sequence with one query is divided into splits as in attention_decode(), any other
// query's block walks over all its keys.
#include "llmserve/cuda/attention_launch.h"

namespace llmserve::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kKeys = kWarpSize;  // of a tile: one a lane
constexpr int kHeadsPerWarp = kHeadsPerBlock / kWarps;
constexpr int kMaxHeadDim = 256;
constexpr int kDimensions = kMaxHeadDim / kThreads;  // of a thread, at most

struct FmaRow {
  int token;
  int seq;
  KeyRange visible;
};

// The query at `token`, unless it is its sequence's only one: then token is -1.
LLMSERVE_DEVICE FmaRow find_row(const AttentionArgs& args, int token) {
  int low = 0;
  int high = args.num_seqs;
  while (low < high) {  // the last sequence that begins at or before the token
    const int middle = (low + high + 1) / 2;
    if (args.cu_seqlens_q[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == args.num_seqs) return {token, low, {0, 0}};
  const int end = args.cu_seqlens_q[low + 1];
  if (end - args.cu_seqlens_q[low] == 1) return {-1, low, {0, 0}};
  return {token, low, visible_keys(args.seq_lens[low] - (end - token), args.sliding_window)};
}

// One block's heads: the lanes of warp w share the numbers of heads w and w + kWarps; thread t has
// dimensions t and t + kThreads of the output of all heads.
template <typename Cache>
class FmaBlock {
 public:
  LLMSERVE_DEVICE FmaBlock(SharedMemory& memory, const AttentionArgs& args, FmaRow row, int kv_head,
                           int first_head, int num_heads)
      : args_(args),
        row_(row),
        kv_head_(kv_head),
        first_head_(first_head),
        num_heads_(num_heads),
        pitch_(tile_pitch<Cache>(args.head_dim)),
        logit_(args, head_scale(args.k_scale, kv_head)) {
    queries_ = memory.take<float>(kHeadsPerBlock * args.head_dim);
    k_ = memory.take<Cache>(kKeys * pitch_);
    v_ = memory.take<Cache>(kKeys * pitch_);
    weights_ = memory.take<float>(kHeadsPerBlock * kKeys);
    factors_ = memory.take<float>(kHeadsPerBlock);
    const int64_t start = row.token * args.q_token_stride;
    for (int i = static_cast<int>(threadIdx.x); i < num_heads * args.head_dim; i += kThreads) {
      const int64_t head = first_head + i / args.head_dim;
      queries_[i] =
          load_element(args.q, args.type, start + head * args.q_head_stride + i % args.head_dim);
    }
  }

  static size_t shared_memory(int head_dim) {
    const auto size = static_cast<size_t>(head_dim);
    return shared_bytes<float>(kHeadsPerBlock * size) +
           2 * shared_bytes<Cache>(static_cast<size_t>(kKeys * tile_pitch<Cache>(head_dim))) +
           shared_bytes<float>(kHeadsPerBlock * kKeys) + shared_bytes<float>(kHeadsPerBlock);
  }

  LLMSERVE_DEVICE void run(KeyRange keys) {
#pragma unroll
    for (int j = 0; j < kHeadsPerWarp; ++j) {
      m_[j] = -INFINITY;
      denominator_[j] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < kHeadsPerBlock; ++h) {
#pragma unroll
      for (int d = 0; d < kDimensions; ++d) out_[h][d] = 0.0f;
    }
    for (int key = keys.begin; key < keys.end; key += kKeys) {
      block_sync();  // the tile before is used up
      load_tile(key, keys.end);
      block_sync();
      weigh(key + lane_id() < keys.end);
      block_sync();
      add_values();
    }
    block_sync();
  }

  LLMSERVE_DEVICE void store_output() { store(1, nullptr, nullptr); }

  LLMSERVE_DEVICE void store_partials(int max_splits, int split) {
    const int64_t row = partial_row(args_, max_splits, row_.seq, first_head_) + split;
    const Partials to = partials(args_, max_splits);
    store(max_splits, to.out + row * args_.head_dim, to.stats + 2 * row);
  }

 private:
  LLMSERVE_DEVICE void load_tile(int first_key, int end) {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(Cache));
    const int pieces = args_.head_dim / kPiece;
    const int64_t row_stride = static_cast<int64_t>(args_.num_kv_heads) * args_.head_dim;
    const int32_t* const table = args_.block_tables + row_.seq * args_.table_stride;
    for (int i = static_cast<int>(threadIdx.x); i < kKeys * pieces; i += kThreads) {
      const int key = first_key + i / pieces;
      const bool is_visible = key < end;  // other slots may hold anything, and 0 * NaN is NaN
      const int64_t block_id = is_visible ? table[key / args_.block_size] : 0;
      const int column = i % pieces * kPiece;
      const int64_t offset =
          key % args_.block_size * row_stride + kv_head_ * args_.head_dim + column;
      const int to = i / pieces * pitch_ + column;
      copy_async16(
          k_ + to,
          static_cast<const Cache*>(args_.k_cache) + (block_id * args_.k_block_stride + offset),
          is_visible);
      copy_async16(
          v_ + to,
          static_cast<const Cache*>(args_.v_cache) + (block_id * args_.v_block_stride + offset),
          is_visible);
    }
    copy_commit();
    copy_wait<0>();
  }

  // The weights of the tile's keys, and by how much what is there already shrinks.
  LLMSERVE_DEVICE void weigh(bool is_visible) {
    const int warp = warp_id();
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < kHeadsPerWarp; ++j) {
      const int head = warp + j * kWarps;
      if (head >= num_heads_) break;
      const float logit = is_visible ? logit_(multiply(head)) : -INFINITY;
      const float m = max(m_[j], warp_max(logit));
      const float weight = fast_exp2(logit - finite_max(m));
      const float factor = fast_exp2(m_[j] - finite_max(m));
      m_[j] = m;
      denominator_[j] = denominator_[j] * factor + warp_sum(weight);
      weights_[head * kKeys + lane] = weight;
      if (lane == 0) factors_[head] = factor;
    }
  }

  LLMSERVE_DEVICE float multiply(int head) const {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(Cache));
    float sum = 0.0f;
    for (int d = 0; d < args_.head_dim; d += kPiece) {
      float k[kPiece];
      unpack<Cache>(k_.load16(lane_id() * pitch_ + d), k);
#pragma unroll
      for (int i = 0; i < kPiece; i += 4) {
        float q[4];
        unpack<float>(queries_.load16(head * args_.head_dim + d + i), q);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum = fmaf(q[j], k[i + j], sum);
      }
    }
    return sum;
  }

  LLMSERVE_DEVICE void add_values() {
#pragma unroll
    for (int d = 0; d < kDimensions; ++d) {
      const int dimension = static_cast<int>(threadIdx.x) + d * kThreads;
      if (dimension >= args_.head_dim) break;
#pragma unroll
      for (int h = 0; h < kHeadsPerBlock; ++h) {
        if (h < num_heads_) out_[h][d] *= factors_[h];
      }
      for (int key = 0; key < kKeys; ++key) {
        const float v = to_float(v_[key * pitch_ + dimension]);
#pragma unroll
        for (int h = 0; h < kHeadsPerBlock; ++h) {
          if (h < num_heads_) out_[h][d] = fmaf(weights_[h * kKeys + key], v, out_[h][d]);
        }
      }
    }
  }

  // The output if `partial` is null, else this and the stats of partials, heads head_stride rows
  // apart.
  LLMSERVE_DEVICE void store(int head_stride, float* partial, float* stats) {
    const float value_scale = head_scale(args_.v_scale, kv_head_);
#pragma unroll
    for (int j = 0; j < kHeadsPerWarp; ++j) {
      const int head = warp_id() + j * kWarps;
      if (head >= num_heads_ || lane_id() != 0) break;
      if (partial == nullptr) {
        factors_[head] =
            value_scale * normalizer(args_, first_head_ + head, m_[j], denominator_[j]);
      } else {
        factors_[head] = value_scale;
        stats[2 * static_cast<int64_t>(head) * head_stride] = m_[j];
        stats[2 * static_cast<int64_t>(head) * head_stride + 1] = denominator_[j];
      }
    }
    block_sync();
    const int64_t out_row = static_cast<int64_t>(row_.token) * args_.num_heads + first_head_;
#pragma unroll
    for (int h = 0; h < kHeadsPerBlock; ++h) {
      if (h >= num_heads_) break;
#pragma unroll
      for (int d = 0; d < kDimensions; ++d) {
        const int dimension = static_cast<int>(threadIdx.x) + d * kThreads;
        if (dimension >= args_.head_dim) break;
        const float x = out_[h][d] * factors_[h];
        if (partial == nullptr) {
          store_element(args_.out, args_.type, (out_row + h) * args_.head_dim + dimension, x);
        } else {
          partial[static_cast<int64_t>(h) * head_stride * args_.head_dim + dimension] = x;
        }
      }
    }
  }

  const AttentionArgs& args_;
  FmaRow row_;
  int kv_head_;
  int first_head_;
  int num_heads_;
  int pitch_;
  Logit logit_;
  Shared<float> queries_;  // [kHeadsPerBlock, head_dim]
  Shared<Cache> k_;        // [kKeys, pitch]
  Shared<Cache> v_;
  Shared<float> weights_;  // [kHeadsPerBlock, kKeys]
  Shared<float> factors_;  // [kHeadsPerBlock]
  float m_[kHeadsPerWarp];
  float denominator_[kHeadsPerWarp];
  float out_[kHeadsPerBlock][kDimensions];
};

template <typename Cache>
__global__ void __launch_bounds__(kThreads)
    attention_decode_fma(const AttentionArgs args, const int max_splits) {
  SharedMemory memory;
  const DecodeRow found = decode_row(args, static_cast<int>(blockIdx.y));
  if (found.token < 0) return;
  const HeadSet heads = find_heads(args, static_cast<int>(blockIdx.x));
  const int first_split = static_cast<int>(blockIdx.z);
  if (found.seq_len <= 0) {
    if (first_split == 0) store_zeros(args, found.token, heads.first_head, heads.num_heads);
    return;
  }
  const FmaRow row = {found.token, static_cast<int>(blockIdx.y),
                      visible_keys(found.seq_len - 1, args.sliding_window)};
  const Splits splits = divide_keys(row.visible);
  const int num_splits = min(splits.count, max_splits);
  if (first_split >= num_splits) return;
  FmaBlock<Cache> block(memory, args, row, heads.kv_head, heads.first_head, heads.num_heads);
  for (int split = first_split; split < num_splits; split += static_cast<int>(gridDim.z)) {
    const int begin = splits.begin + split * splits.length;
    block.run({max(begin, row.visible.begin), min(begin + splits.length, row.visible.end)});
    if (num_splits == 1) {
      block.store_output();
    } else {
      block.store_partials(max_splits, split);
    }
  }
}

template <typename Cache>
__global__ void __launch_bounds__(kThreads, 6) attention_prefill_fma(const AttentionArgs args) {
  SharedMemory memory;
  const FmaRow row = find_row(args, static_cast<int>(blockIdx.x));
  if (row.token < 0) return;
  const HeadSet heads = find_heads(args, static_cast<int>(blockIdx.y));
  if (row.visible.end <= row.visible.begin) {
    store_zeros(args, row.token, heads.first_head, heads.num_heads);
    return;
  }
  FmaBlock<Cache> block(memory, args, row, heads.kv_head, heads.first_head, heads.num_heads);
  block.run(row.visible);
  block.store_output();
}

// Calls `function` with an element of the cache's type.
template <typename Function>
void with_cache_type(DType type, Function function) {
  switch (type) {
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat16:
      return function(half{});
    case DType::kBFloat16:
      return function(bfloat16{});
    default:
      return function(fp8{});
  }
}

}  // namespace

void decode_fma(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream) {
  with_cache_type(args.cache_type, [&](auto element) {
    using Cache = decltype(element);
    launch(attention_decode_fma<Cache>, decode_grid(args, num_blocks_z), Dim3(kThreads),
           FmaBlock<Cache>::shared_memory(args.head_dim), stream, args, max_splits);
  });
}

void prefill_fma(const AttentionArgs& args, Stream stream) {
  with_cache_type(args.cache_type, [&](auto element) {
    using Cache = decltype(element);
    const Dim3 grid(static_cast<unsigned>(args.num_tokens), decode_grid(args, 1).x);
    launch(attention_prefill_fma<Cache>, grid, Dim3(kThreads),
           FmaBlock<Cache>::shared_memory(args.head_dim), stream, args);
  });
}

}  // namespace llmserve::cuda
