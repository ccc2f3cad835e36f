// The launcher of sample_rows, its first kernel, and what follows it.
#include "llmserve/cuda/sampling.h"

#include <utility>

#include "llmserve/cuda/sampling_state.h"

namespace llmserve::cuda {
namespace {

// The smallest float that is not below value.
LLMSERVE_DEVICE float round_up(double value) {
  const float rounded = static_cast<float>(value);
  return static_cast<double>(rounded) < value ? nextafterf(rounded, INFINITY) : rounded;
}

LLMSERVE_DEVICE void begin_draw(const SamplingRow& params, float max, RowState& state) {
  state.max = max;
  state.inv_temperature = static_cast<float>(1 / params.temperature);
  Filter filter{};
  filter.threshold = kMinusInfinity;
  filter.floor_key = key_of(kMinusInfinity) + 1;
  if (params.min_p > 0) {
    filter.threshold =
        round_up(static_cast<double>(max) + params.temperature * log(params.min_p));
    filter.floor_key = ::llmserve::cuda::max(filter.floor_key, key_of(filter.threshold));
  }
  state.filters[0] = filter;
}

__global__ void __launch_bounds__(kSamplingThreads) maxima_kernel(const SamplingCall call) {
  LLMSERVE_SHARED(uint64_t, scratch, kSamplingThreads / kWarpSize);
  LLMSERVE_SHARED(int, flag, 1);
  const int64_t row = blockIdx.y;
  const int segment = static_cast<int>(blockIdx.x);
  const int num_segments = static_cast<int>(gridDim.x);
  SegmentSum* const segments = call.workspace.segments(row);
  RowState& state = call.workspace.state(row);

  const uint64_t best_here = best_of_thread(call.row_of_logits(row), segment);
  const uint64_t best_of_segment = block_max_ranked(best_here, scratch);
  if (threadIdx.x == 0) segments[segment].best = best_of_segment;
  if (!is_last_block(&state.num_finished_blocks, num_segments, flag)) return;

  const int other = static_cast<int>(threadIdx.x);
  const uint64_t best = block_max_ranked(other < num_segments ? segments[other].best : 0, scratch);
  if (threadIdx.x != 0) return;
  const float max = logit_of(best);
  state.is_drawn = 0;
  if (best == kInvalidBest) {
    call.out[row] = {0, 0, 0, RowStatus::kInvalid};
  } else if (max == kMinusInfinity) {
    call.out[row] = {0, 0, 0, RowStatus::kEmpty};
  } else if (call.params[row].temperature > 0 && (call.stages & kDrawStage)) {
    state.is_drawn = 1;
    begin_draw(call.params[row], max, state);
  } else {
    const int token_id = id_of(best);
    call.out[row] = {max, token_id, token_id, RowStatus::kOk};
  }
}

__global__ void __launch_bounds__(kSamplingThreads)
    store_tokens_kernel(const SampledRow* sampled, const int32_t* target_rows,
                        int32_t* last_tokens, const int64_t num_rows) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_rows || target_rows[i] < 0 || sampled[i].status != RowStatus::kOk) return;
  last_tokens[target_rows[i]] = sampled[i].token_id;
}

int64_t row_bytes_of(int64_t vocab_size) {
  const size_t bytes = sizeof(RowState) + kNumBins * sizeof(int64_t) +
                       static_cast<size_t>(num_segments_of(vocab_size)) * sizeof(SegmentSum);
  return static_cast<int64_t>(ceil_div(bytes, alignof(RowState)) * alignof(RowState));
}

}  // namespace

size_t sampling_workspace_bytes(int64_t num_rows, int64_t vocab_size) {
  return static_cast<size_t>(num_rows * row_bytes_of(vocab_size));
}

void launch_maxima(const SamplingCall& call, Stream stream) {
  launch(maxima_kernel, sampling_grid(call.logits.vocab_size, call.logits.num_rows),
         Dim3(kSamplingThreads), 0, stream, call);
}

void sample_rows(const Logits& logits, const Masks& masks, const SamplingRow* params,
                 int32_t stages, SampledRow* out, void* workspace, Stream stream) {
  const SamplingWorkspace rows{static_cast<uint8_t*>(workspace), row_bytes_of(logits.vocab_size)};
  const SamplingCall call{logits, masks, params, stages, out, rows, is_vectorizable(logits)};
  launch_maxima(call, stream);
  if (!(stages & kDrawStage)) return;
  int step = 0;
  for (const auto& [stage, is_by_weight] : {std::pair(kTopKStage, false), {kTopPStage, true}}) {
    if (!(stages & stage)) continue;
    launch_search(call, step, is_by_weight, stream);
    step += kNumDigits;
  }
  launch_draw(call, step, stream);
}

void store_tokens(const SampledRow* sampled, const int32_t* target_rows, int32_t* last_tokens,
                  int64_t num_rows, Stream stream) {
  launch(store_tokens_kernel,
         Dim3(static_cast<unsigned>(ceil_div<int64_t>(num_rows, kSamplingThreads))),
         Dim3(kSamplingThreads), 0, stream, sampled, target_rows, last_tokens, num_rows);
}

}  // namespace llmserve::cuda
