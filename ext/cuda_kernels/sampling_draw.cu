// Draws a token of the kept ones through their cumulative weight in the order of ids.
#include "llmserve/cuda/sampling_state.h"

namespace llmserve::cuda {
namespace {

constexpr int kLogitsPerThread = kSegment / kSamplingThreads;

// 53 random bits, as llmserve::uniform_at: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel
// Random Numbers: As Easy as 1, 2, 3, SC 2011).
LLMSERVE_DEVICE uint64_t random_bits(uint64_t seed, uint64_t counter) {
  uint32_t word[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * word[2];
    word[0] = static_cast<uint32_t>(product1 >> 32) ^ word[1] ^ key[0];
    word[1] = static_cast<uint32_t>(product1);
    word[2] = static_cast<uint32_t>(product0 >> 32) ^ word[3] ^ key[1];
    word[3] = static_cast<uint32_t>(product0);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return (uint64_t{word[1]} << 32 | word[0]) >> 11;
}

// bits * 2^-53 of a total, rounded down.
LLMSERVE_DEVICE int64_t share_of(uint64_t bits, int64_t total) {
  using Wide = unsigned __int128;
  return static_cast<int64_t>(static_cast<Wide>(bits) * static_cast<Wide>(total) >> 53);
}

// Which tokens the filters kept: those above a key, and the first of those that have it.
struct Kept {
  uint32_t tie_key;
  bool has_ties;
  int64_t tie_weight;
  int64_t num_ties;  // kept

  LLMSERVE_DEVICE Kept(const Filter& filter, const Weigher& weigh)
      : tie_key(filter.has_top_p ? filter.prefix : filter.floor_key - 1),
        has_ties(filter.has_top_p),
        tie_weight(has_ties ? weigh(logit_of(tie_key)) : 0),
        num_ties(has_ties ? ceil_div(filter.wanted - filter.above, tie_weight) : 0) {}

  LLMSERVE_DEVICE bool is_tie(uint32_t key) const { return has_ties && key == tie_key; }
};

// Calls f(logit, id) for the thread's run of neighbours in a segment.
template <typename F>
LLMSERVE_DEVICE void for_each_neighbour(const RowOfLogits& row, int segment, const F& f) {
  const int first = segment * kSegment + static_cast<int>(threadIdx.x) * kLogitsPerThread;
  float x[kVectorsPerThread][kVector];
  row.load(segment, first, kVector, x);
#pragma unroll
  for (int i = 0; i < kLogitsPerThread; ++i) f(x[i / kVector][i % kVector], first + i);
}

// Where the last block of a row finds what it looks for.
struct Place {
  int64_t segment;
  int64_t rest;  // of what was wanted, when the segments before have given theirs
};

__global__ void __launch_bounds__(kSamplingThreads) draw_kernel(const SamplingCall call,
                                                               const int step) {
  LLMSERVE_SHARED(int64_t, scratch, kSamplingThreads / kWarpSize);
  LLMSERVE_SHARED(int, flag, 1);
  LLMSERVE_SHARED(Place, drawn, 1);
  LLMSERVE_SHARED(Place, last_tie, 1);
  LLMSERVE_SHARED(int, last_tie_id, 1);
  const int64_t row_id = blockIdx.y;
  RowState& state = call.workspace.state(row_id);
  if (!state.is_drawn) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int segment = static_cast<int>(blockIdx.x);
  const int num_segments = static_cast<int>(gridDim.x);
  const RowOfLogits row = call.row_of_logits(row_id);
  const Weigher weigh{state.max, state.inv_temperature};
  const Filter filter = state.filters[step];
  const Kept kept(filter, weigh);
  SegmentSum* const segments = call.workspace.segments(row_id);

  int64_t weight = 0;
  int64_t num_ties = 0;
  if (static_cast<uint32_t>(segments[segment].best >> 32) >= kept.tie_key) {
    for_each_logit(row, segment, [&](float logit, int) {
      const uint32_t key = key_of(logit);
      if (key > kept.tie_key) weight += weigh(logit);
      num_ties += kept.is_tie(key);
    });
  }
  int64_t sum = 0;
  sum_before(weight, scratch, &sum);
  if (thread == 0) segments[segment].weight = sum;
  sum_before(num_ties, scratch, &sum);
  if (thread == 0) segments[segment].num_ties = sum;
  if (!is_last_block(&state.num_finished_blocks, num_segments, flag)) return;

  // One thread per segment: where the wanted weight and the last tie are reached.
  weight = thread < num_segments ? segments[thread].weight : 0;
  num_ties = thread < num_segments ? segments[thread].num_ties : 0;
  const int64_t ties_before = sum_before(num_ties, scratch, &sum);
  const int64_t ties_left = kept.num_ties - ties_before;
  if (ties_left > 0 && ties_left <= num_ties) last_tie[0] = {thread, ties_left};
  weight += kept.tie_weight * min(max<int64_t>(ties_left, 0), num_ties);
  int64_t total = 0;
  const int64_t weight_before = sum_before(weight, scratch, &total);
  const SamplingRow& params = call.params[row_id];
  const int64_t target = share_of(random_bits(params.seed, params.counter), total);
  if (weight_before <= target && target < weight_before + weight) {
    drawn[0] = {thread, target - weight_before};
  }
  if (thread == 0) last_tie_id[0] = INT32_MAX;
  block_sync();

  if (kept.has_ties) {
    num_ties = 0;
    const int tie_segment = static_cast<int>(last_tie[0].segment);
    for_each_neighbour(row, tie_segment, [&](float logit, int) {
      num_ties += kept.is_tie(key_of(logit));
    });
    int64_t left = last_tie[0].rest - sum_before(num_ties, scratch, &sum);
    for_each_neighbour(row, tie_segment, [&](float logit, int id) {
      if (kept.is_tie(key_of(logit)) && --left == 0) last_tie_id[0] = id;
    });
    block_sync();
  }
  const auto weight_if_kept = [&](float logit, int id) -> int64_t {
    const uint32_t key = key_of(logit);
    const bool is_kept = key > kept.tie_key || (kept.is_tie(key) && id <= last_tie_id[0]);
    return is_kept ? weigh(logit) : 0;
  };
  weight = 0;
  const int drawn_segment = static_cast<int>(drawn[0].segment);
  for_each_neighbour(row, drawn_segment,
                     [&](float logit, int id) { weight += weight_if_kept(logit, id); });
  int64_t left = drawn[0].rest - sum_before(weight, scratch, &sum);
  for_each_neighbour(row, drawn_segment, [&](float logit, int id) {
    const int64_t own = weight_if_kept(logit, id);
    if (left >= 0 && left < own) {
      call.out[row_id] = {filter.threshold, last_tie_id[0], id, RowStatus::kOk};
    }
    left -= own;
  });
}

}  // namespace

void launch_draw(const SamplingCall& call, int step, Stream stream) {
  launch(draw_kernel, sampling_grid(call.logits.vocab_size, call.logits.num_rows),
         Dim3(kSamplingThreads), 0, stream, call, step);
}

}  // namespace llmserve::cuda
