// log_softmax of rows at one token and at their best tokens. Sums of exponentials are in double, in
// an order that hangs on the size of the vocabulary alone.
#include "llmserve/cuda/sampling_row.h"

namespace llmserve::cuda {
namespace {

struct SegmentPart {
  uint64_t best;
  double sum;          // of exp(logit - the row's maximum)
  int64_t num_better;  // tokens before the one asked for
};

struct alignas(128) RowCounter {
  int32_t num_finished_blocks;
};

struct LogprobCall {
  LogprobArgs args;
  RowCounter* counters;  // [num_rows]
  SegmentPart* parts;    // [num_rows, part_stride]
  uint64_t* candidates;  // [num_rows, num_segments, top_k], best first
  int64_t part_stride;
  bool is_vectorized;

  LLMSERVE_DEVICE RowOfLogits row_of_logits(int64_t i) const {
    const int64_t row = args.row_ids == nullptr ? i : args.row_ids[i];
    return ::llmserve::cuda::row_of_logits(args.logits, Masks{}, row, is_vectorized);
  }
};

__global__ void __launch_bounds__(kSamplingThreads) best_kernel(const LogprobCall call) {
  LLMSERVE_SHARED(uint64_t, scratch, kSamplingThreads / kWarpSize);
  const int segment = static_cast<int>(blockIdx.x);
  const uint64_t own = best_of_thread(call.row_of_logits(blockIdx.y), segment);
  const uint64_t best = block_max_ranked(own, scratch);
  if (threadIdx.x != 0) return;
  call.parts[blockIdx.y * call.part_stride + segment].best = best;
  if (segment == 0) call.counters[blockIdx.y].num_finished_blocks = 0;
}

// Sum over the block in a fixed order, for every thread.
LLMSERVE_DEVICE double block_sum_double(double value, Shared<double> scratch) {
  value = group_sum<kWarpSize>(value);
  block_sync();
  if (lane_id() == 0) scratch[warp_id()] = value;
  block_sync();
  double sum = 0;
#pragma unroll
  for (int w = 0; w < kSamplingThreads / kWarpSize; ++w) sum += scratch[w];
  return sum;
}

// The thread's best token of those after `last`, 0 if there is none.
LLMSERVE_DEVICE uint64_t best_below(const RowOfLogits& row, int segment, uint64_t last) {
  uint64_t best = 0;
  for_each_logit(row, segment, [&](float logit, int id) {
    const uint64_t candidate = ranked(logit, id);
    if (candidate < last) best = max(best, candidate);
  });
  return best;
}

LLMSERVE_DEVICE void write_invalid(const LogprobArgs& args, int64_t i, int token_id) {
  for (int64_t j = threadIdx.x; j < args.top_k; j += blockDim.x) {
    args.top_ids[i * args.top_k + j] = static_cast<int32_t>(j);
    args.top_logprobs[i * args.top_k + j] = NAN;
  }
  if (threadIdx.x != 0) return;
  args.logprobs[i] = NAN;
  args.ranks[i] = token_id + 1;
}

__global__ void __launch_bounds__(kSamplingThreads) logprob_kernel(const LogprobCall call) {
  LLMSERVE_SHARED(uint64_t, scratch, kSamplingThreads / kWarpSize);
  LLMSERVE_SHARED(int, flag, 1);
  const LogprobArgs& args = call.args;
  const int64_t i = blockIdx.y;
  const int thread = static_cast<int>(threadIdx.x);
  const int segment = static_cast<int>(blockIdx.x);
  const int num_segments = static_cast<int>(gridDim.x);
  const RowOfLogits row = call.row_of_logits(i);
  SegmentPart* const parts = call.parts + i * call.part_stride;
  const int64_t token_row = args.token_rows == nullptr ? i : args.token_rows[i];
  const int token_id = args.token_ids[token_row * args.token_stride];
  const uint64_t best = block_max_ranked(thread < num_segments ? parts[thread].best : 0, scratch);
  const float max = logit_of(best);
  if (best == kInvalidBest || max == kMinusInfinity || token_id < 0 ||
      token_id >= row.vocab_size) {
    if (segment == 0) write_invalid(args, i, token_id);
    return;
  }

  const float logit = row.logits[token_id];
  double sum = 0;
  int64_t num_better = 0;
  for_each_logit(row, segment, [&](float x, int id) {
    sum += static_cast<double>(expf(x - max));
    num_better += x > logit || (x == logit && id < token_id);
  });
  sum = block_sum_double(sum, scratch.as<double>());
  int64_t total = 0;
  sum_before(num_better, scratch.as<int64_t>(), &total);
  if (thread == 0) {
    parts[segment].sum = sum;
    parts[segment].num_better = total;
  }
  uint64_t* const candidates = call.candidates + i * num_segments * args.top_k;
  uint64_t own = args.top_k > 0 ? best_below(row, segment, kInvalidBest) : 0;
  for (int64_t j = 0; j < args.top_k; ++j) {
    const uint64_t next = block_max_ranked(own, scratch);
    if (thread == 0) candidates[segment * args.top_k + j] = next;
    if (own == next) own = best_below(row, segment, next);
  }
  if (!is_last_block(&call.counters[i].num_finished_blocks, num_segments, flag)) return;

  sum = block_sum_double(thread < num_segments ? parts[thread].sum : 0, scratch.as<double>());
  num_better = thread < num_segments ? parts[thread].num_better : 0;
  sum_before(num_better, scratch.as<int64_t>(), &total);
  const double norm = static_cast<double>(max) + log(sum);
  if (thread == 0) {
    args.logprobs[i] = static_cast<double>(logit) - norm;
    args.ranks[i] = static_cast<int32_t>(total + 1);
  }
  // One thread per segment merges the segments' lists.
  const uint64_t* list = candidates + thread * args.top_k;
  const uint64_t* const end = thread < num_segments ? list + args.top_k : list;
  for (int64_t j = 0; j < args.top_k; ++j) {
    const uint64_t head = list < end ? *list : 0;
    const uint64_t next = block_max_ranked(head, scratch);
    if (head != next) continue;
    ++list;
    args.top_ids[i * args.top_k + j] = id_of(next);
    args.top_logprobs[i * args.top_k + j] = static_cast<double>(logit_of(next)) - norm;
  }
}

LogprobCall lay_out(const LogprobArgs& args, void* workspace) {
  constexpr int64_t kLine = 128 / sizeof(int64_t);
  LogprobCall call{};
  call.args = args;
  call.part_stride = ceil_div<int64_t>(num_segments_of(args.logits.vocab_size), kLine) * kLine;
  call.counters = static_cast<RowCounter*>(workspace);
  call.parts = reinterpret_cast<SegmentPart*>(call.counters + args.num_rows);
  call.candidates = reinterpret_cast<uint64_t*>(call.parts + args.num_rows * call.part_stride);
  call.is_vectorized = is_vectorizable(args.logits);
  return call;
}

}  // namespace

size_t logprob_workspace_bytes(int64_t num_rows, int64_t vocab_size, int64_t top_k) {
  LogprobArgs args{};
  args.logits.vocab_size = vocab_size;
  args.num_rows = num_rows;
  const int64_t num_candidates = num_rows * num_segments_of(vocab_size) * top_k;
  return reinterpret_cast<uintptr_t>(lay_out(args, nullptr).candidates) +
         static_cast<size_t>(num_candidates) * sizeof(uint64_t);
}

void logprob_rows(const LogprobArgs& args, void* workspace, Stream stream) {
  const LogprobCall call = lay_out(args, workspace);
  const Dim3 grid(static_cast<unsigned>(num_segments_of(args.logits.vocab_size)),
                  static_cast<unsigned>(args.num_rows));
  launch(best_kernel, grid, Dim3(kSamplingThreads), 0, stream, call);
  launch(logprob_kernel, grid, Dim3(kSamplingThreads), 0, stream, call);
}

}  // namespace llmserve::cuda
