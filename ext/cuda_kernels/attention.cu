// Paged attention: which kernels a call takes, and the one that merges splits.
#include "llmserve/cuda/attention_launch.h"

namespace llmserve::cuda {

namespace {

constexpr int kReduceWarps = 4;

// Blocks of decode_*() per multiprocessor that a launch aims at, resident or waiting: enough that
// the last ones leave few multiprocessors idle, few enough that the blocks of splits which shorter
// sequences do not have cost little (a graph is captured for the longest).
constexpr int kBlocksPerMultiprocessor = 64;

// One warp for each head of a sequence. Merges in the order of the splits.
__global__ void __launch_bounds__(kReduceWarps* kWarpSize)
    attention_reduce(const AttentionArgs args, const int max_splits) {
  LLMSERVE_SHARED(float, weights, kReduceWarps* kMaxSplits);
  const int seq = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.x) * kReduceWarps + warp_id();
  const DecodeRow row = decode_row(args, seq);
  if (head >= args.num_heads || row.token < 0 || row.seq_len <= 0) return;
  const KeyRange visible = visible_keys(row.seq_len - 1, args.sliding_window);
  const int num_splits = min(divide_keys(visible).count, max_splits);
  if (num_splits == 1) return;  // its block has written the output

  const int64_t first = partial_row(args, max_splits, seq, head);
  const Partials from = partials(args, max_splits);
  constexpr int kPerLane = kMaxSplits / kWarpSize;
  float m[kPerLane];
  float denominator[kPerLane];
  float all_m = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int split = lane_id() + i * kWarpSize;
    const bool exists = split < num_splits;
    m[i] = exists ? from.stats[2 * (first + split)] : -INFINITY;
    denominator[i] = exists ? from.stats[2 * (first + split) + 1] : 0.0f;
    all_m = max(all_m, m[i]);
  }
  all_m = warp_max(all_m);
  float sum = 0.0f;
  const Shared<float> own = weights + warp_id() * kMaxSplits;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float weight = fast_exp2(m[i] - finite_max(all_m));
    own[lane_id() + i * kWarpSize] = weight;
    sum += weight * denominator[i];
  }
  warp_sync();
  const float factor = normalizer(args, head, all_m, warp_sum(sum));
  const int64_t out = (static_cast<int64_t>(row.token) * args.num_heads + head) * args.head_dim;
  for (int d = 4 * lane_id(); d < args.head_dim; d += 4 * kWarpSize) {
    float total[4] = {};
#pragma unroll 8
    for (int split = 0; split < num_splits; ++split) {
      float part[4];
      unpack<float>(load16(from.out + (first + split) * args.head_dim + d), part);
      const float weight = own[split];
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] = fmaf(weight, part[j], total[j]);
    }
    store_pair(args.out, args.type, out + d, total[0] * factor, total[1] * factor);
    store_pair(args.out, args.type, out + d + 2, total[2] * factor, total[3] * factor);
  }
}

// Whether tensor cores can take the call.
bool is_for_tensor_cores(const AttentionArgs& args) {
  switch (args.head_dim) {
    case 64:
    case 80:
    case 96:
    case 128:
    case 256:
      break;
    default:
      return false;
  }
  const bool is_known = args.cache_type == args.type || args.cache_type == DType::kFloat8;
  return args.type != DType::kFloat32 && is_known && args.block_size % kTileKeys == 0;
}

void decode(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream) {
  if (!is_for_tensor_cores(args)) return decode_fma(args, max_splits, num_blocks_z, stream);
  switch (args.cache_type) {
    case DType::kFloat16:
      return decode_float16(args, max_splits, num_blocks_z, stream);
    case DType::kBFloat16:
      return decode_bfloat16(args, max_splits, num_blocks_z, stream);
    default:
      return decode_fp8(args, max_splits, num_blocks_z, stream);
  }
}

void prefill(const AttentionArgs& args, Stream stream) {
  if (!is_for_tensor_cores(args)) return prefill_fma(args, stream);
  switch (args.cache_type) {
    case DType::kFloat16:
      return prefill_float16(args, stream);
    case DType::kBFloat16:
      return prefill_bfloat16(args, stream);
    default:
      return prefill_fp8(args, stream);
  }
}

}  // namespace

size_t attention_workspace_bytes(const AttentionArgs& args) {
  const int splits = max_splits(args.max_seq_len, args.sliding_window);
  if (splits == 1) return 0;
  const auto rows = static_cast<size_t>(partial_row(args, splits, args.num_seqs, 0));
  return rows * static_cast<size_t>(args.head_dim + 2) * sizeof(float);
}

void paged_attention(const AttentionArgs& args, Stream stream) {
  const int splits = max_splits(args.max_seq_len, args.sliding_window);
  const Dim3 rows = decode_grid(args, 1);
  const auto num_blocks = static_cast<int>(max(rows.x * rows.y, 1u));
  const int wanted = ceil_div(kBlocksPerMultiprocessor * num_multiprocessors(), num_blocks);
  decode(args, splits, min(wanted, splits), stream);
  if (splits > 1) {
    const Dim3 grid(static_cast<unsigned>(ceil_div(args.num_heads, kReduceWarps)), rows.y);
    launch(attention_reduce, grid, Dim3(kReduceWarps * kWarpSize), 0, stream, args, splits);
  }
  // Also for tokens that no sequence has.
  if (args.max_query_len > 1 || args.num_tokens > args.num_seqs) prefill(args, stream);
}

}  // namespace llmserve::cuda
