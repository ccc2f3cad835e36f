// Attention of sequences with one query on tensor cores. A block takes splits of the keys of one KV
// head, for up to eight query heads that share it. Included by attention_decode_*.cu alone.
#pragma once

#include "llmserve/cuda/attention_decode_warp.h"

namespace llmserve::cuda {

// What a block works on.
struct DecodeTask {
  int seq;
  int token;
  int kv_head;
  int first_head;
  int num_heads;
  int num_splits;  // of the sequence; 1: the block writes the output itself
  int max_splits;
};

// Merges what the warps of a block have seen of a split.
template <typename Cache, int kHeadDim>
class WarpMerger {
  using Shape = DecodeShape<Cache, kHeadDim>;

 public:
  // outputs: kWarps * Shape::kMerge; maxima and denominators: kWarps * kHeadsPerBlock; factors:
  // kHeadsPerBlock.
  LLMSERVE_DEVICE WarpMerger(const AttentionArgs& args, const DecodeTask& task,
                             Shared<float> outputs, Shared<float> maxima,
                             Shared<float> denominators, Shared<float> factors)
      : args_(args),
        task_(task),
        value_scale_(head_scale(args.v_scale, task.kv_head) * kOperandScale<Cache>),
        outputs_(outputs),
        maxima_(maxima),
        denominators_(denominators),
        factors_(factors) {}

  // By all threads of the block. The outputs may lie where the warps had their tiles, and are free
  // again when it returns.
  LLMSERVE_DEVICE void merge(DecodeState<kHeadDim>& state, int split) {
    const int warp = warp_id();
    const int t = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) {
        state.denominator[j] += shuffle_xor(state.denominator[j], mask);
      }
      if (lane_id() < 4) {
        maxima_[warp * kHeadsPerBlock + 2 * t + j] = state.m[j];
        denominators_[warp * kHeadsPerBlock + 2 * t + j] = state.denominator[j];
      }
    }
    block_sync();  // also: the tiles of all warps are used up
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = 2 * t + j;
      float m = -INFINITY;
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) m = max(m, maxima_[w * kHeadsPerBlock + head]);
      store_rescaled(state, j, fast_exp2(state.m[j] - finite_max(m)));
      if (warp == 0 && lane_id() < 4 && head < task_.num_heads) finish_head(head, m, split);
    }
    block_sync();
    add_warps(split);
    block_sync();
  }

 private:
  LLMSERVE_DEVICE void store_rescaled(const DecodeState<kHeadDim>& state, int j, float factor) {
    const int g = lane_id() / 4;
    const int head = 2 * (lane_id() % 4) + j;
    const Shared<float> to = outputs_ + (warp_id() * Shape::kMerge + head * Shape::kMergePitch);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      to[decode_dimension<Cache>(i, g, false)] = state.out[i][j] * factor;
      to[decode_dimension<Cache>(i, g, true)] = state.out[i][j + 2] * factor;
    }
  }

  // The denominator of a head, and what its output is multiplied with.
  LLMSERVE_DEVICE void finish_head(int head, float m, int split) {
    float denominator = 0.0f;
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const int at = w * kHeadsPerBlock + head;
      denominator += denominators_[at] * fast_exp2(maxima_[at] - finite_max(m));
    }
    const int first_head = task_.first_head;
    if (task_.num_splits == 1) {
      factors_[head] = value_scale_ * normalizer(args_, first_head + head, m, denominator);
      return;
    }
    factors_[head] = value_scale_;
    const int64_t row = partial_row(args_, task_.max_splits, task_.seq, first_head + head) + split;
    float* const stats = partials(args_, task_.max_splits).stats;
    stats[2 * row] = m;
    stats[2 * row + 1] = denominator;
  }

  LLMSERVE_DEVICE void add_warps(int split) {
    for (int i = 2 * static_cast<int>(threadIdx.x); i < task_.num_heads * kHeadDim;
         i += 2 * Shape::kThreads) {
      const int head = i / kHeadDim;
      const int dimension = i % kHeadDim;
      float sum[2] = {};
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const int at = w * Shape::kMerge + head * Shape::kMergePitch + dimension;
        sum[0] += outputs_[at];
        sum[1] += outputs_[at + 1];
      }
      sum[0] *= factors_[head];
      sum[1] *= factors_[head];
      if (task_.num_splits == 1) {
        const int64_t row = static_cast<int64_t>(task_.token) * args_.num_heads + task_.first_head;
        store_pair(args_.out, args_.type, row * kHeadDim + i, sum[0], sum[1]);
      } else {
        const int64_t row =
            partial_row(args_, task_.max_splits, task_.seq, task_.first_head + head) + split;
        float* const out = partials(args_, task_.max_splits).out + row * kHeadDim + dimension;
        out[0] = sum[0];
        out[1] = sum[1];
      }
    }
  }

  const AttentionArgs& args_;
  const DecodeTask& task_;
  float value_scale_;
  Shared<float> outputs_;
  Shared<float> maxima_;
  Shared<float> denominators_;
  Shared<float> factors_;
};

template <typename Math, typename Cache, int kHeadDim>
__global__ void __launch_bounds__(DecodeShape<Cache, kHeadDim>::kThreads)
    attention_decode(const AttentionArgs args, const int max_splits) {
  using Shape = DecodeShape<Cache, kHeadDim>;
  SharedMemory memory;
  const Shared<Cache> tiles =
      memory.take<Cache>(static_cast<int>(Shape::kSharedBytes / sizeof(Cache)));
  LLMSERVE_SHARED(float, maxima, Shape::kWarps* kHeadsPerBlock);
  LLMSERVE_SHARED(float, denominators, Shape::kWarps* kHeadsPerBlock);
  LLMSERVE_SHARED(float, factors, kHeadsPerBlock);

  const int seq = static_cast<int>(blockIdx.y);
  const DecodeRow row = decode_row(args, seq);
  if (row.token < 0) return;
  const HeadSet heads = find_heads(args, static_cast<int>(blockIdx.x));
  const int first_split = static_cast<int>(blockIdx.z);
  if (row.seq_len <= 0) {
    if (first_split == 0) store_zeros(args, row.token, heads.first_head, heads.num_heads);
    return;
  }
  const KeyRange visible = visible_keys(row.seq_len - 1, args.sliding_window);
  const Splits splits = divide_keys(visible);
  const int num_splits = min(splits.count, max_splits);
  if (first_split >= num_splits) return;

  const DecodeTask task = {seq,        row.token, heads.kv_head, heads.first_head, heads.num_heads,
                           num_splits, max_splits};
  const int warp = warp_id();
  DecodeWarp<Math, Cache, kHeadDim> worker(args, seq, heads.kv_head,
                                           tiles + warp * Shape::kWarpBuffer);
  worker.load_queries(row.token, heads.first_head, heads.num_heads);
  WarpMerger<Cache, kHeadDim> merger(args, task, tiles.template as<float>(), maxima, denominators,
                                     factors);
  for (int split = first_split; split < num_splits; split += static_cast<int>(gridDim.z)) {
    const int begin =
        max(splits.begin + split * splits.length, visible.begin / kTileKeys * kTileKeys);
    const int end = min(splits.begin + (split + 1) * splits.length, visible.end);
    const int num_tiles = ceil_div(end - begin, kTileKeys);
    DecodeState<kHeadDim> state;
    worker.run({begin + warp * kTileKeys, max(ceil_div(num_tiles - warp, Shape::kWarps), 0)},
               visible, state);
    merger.merge(state, split);
  }
}

template <typename Math, typename Cache, int kHeadDim>
void launch_decode(const AttentionArgs& args, int max_splits, Dim3 grid, Stream stream) {
  using Shape = DecodeShape<Cache, kHeadDim>;
  launch(attention_decode<Math, Cache, kHeadDim>, grid, Dim3(Shape::kThreads), Shape::kSharedBytes,
         stream, args, max_splits);
}

template <typename Math, typename Cache>
void launch_decode(const AttentionArgs& args, int max_splits, Dim3 grid, Stream stream) {
  switch (args.head_dim) {
    case 64:
      return launch_decode<Math, Cache, 64>(args, max_splits, grid, stream);
    case 80:
      return launch_decode<Math, Cache, 80>(args, max_splits, grid, stream);
    case 96:
      return launch_decode<Math, Cache, 96>(args, max_splits, grid, stream);
    case 128:
      return launch_decode<Math, Cache, 128>(args, max_splits, grid, stream);
    default:
      return launch_decode<Math, Cache, 256>(args, max_splits, grid, stream);
  }
}

}  // namespace llmserve::cuda
