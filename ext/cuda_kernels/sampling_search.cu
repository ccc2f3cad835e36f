// Finds the key of the last token that top_k or top_p keeps, digit by digit: a histogram over the
// next digit of the keys that begin with those found, counted by token or by weight. Sums of
// integers are the same in any order, so atomics may add them.
#include "llmserve/cuda/sampling_state.h"

namespace llmserve::cuda {
namespace {

// Of a weight, of which a bin of a segment holds two sums of 32 bits: 4096 * 2^20 fits.
constexpr int kLowBits = 20;

struct Digit {
  int shift;
  int num_bits;

  LLMSERVE_DEVICE bool is_in_group(uint32_t key, uint32_t prefix) const {
    return uint64_t{key ^ prefix} >> (shift + num_bits) == 0;
  }
  LLMSERVE_DEVICE int bin(uint32_t key) const {
    return static_cast<int>(key >> shift & ((1u << num_bits) - 1));
  }
};

constexpr Digit kDigits[kNumDigits] = {{21, 11}, {10, 11}, {0, 10}};

// How much is wanted of a row of which the tokens above the floor have `total`.
template <bool kByWeight>
LLMSERVE_DEVICE int64_t wanted_of(const SamplingRow& params, int64_t total) {
  if constexpr (!kByWeight) return params.top_k;
  const int64_t share = static_cast<int64_t>(ceil(params.top_p * static_cast<double>(total)));
  return ::llmserve::cuda::max<int64_t>(share, 1);
}

template <bool kByWeight>
LLMSERVE_DEVICE bool is_off(const SamplingRow& params, int64_t vocab_size) {
  if constexpr (kByWeight) return params.top_p >= 1;
  return params.top_k <= 0 || params.top_k >= vocab_size;
}

// The filter once the wanted token is known to lie in a bin, with `above` in the bins before.
template <bool kByWeight>
LLMSERVE_DEVICE Filter descend(Filter filter, const Digit& digit, int bin, int64_t above,
                               int64_t wanted) {
  filter.prefix |= static_cast<uint32_t>(bin) << digit.shift;
  filter.above = above;
  filter.wanted = wanted;
  filter.is_searching = digit.shift > 0;
  if (filter.is_searching) return filter;
  filter.threshold = logit_of(filter.prefix);
  if constexpr (kByWeight) {
    filter.has_top_p = 1;
  } else {
    filter.floor_key = filter.prefix;
  }
  return filter;
}

template <bool kByWeight>
__global__ void __launch_bounds__(kSamplingThreads)
    search_kernel(const SamplingCall call, const Digit digit, const int step,
                  const bool is_first) {
  constexpr int kBinsPerThread = kNumBins / kSamplingThreads;
  LLMSERVE_SHARED(unsigned, low, kNumBins);
  LLMSERVE_SHARED(unsigned, high, kByWeight ? kNumBins : 1);
  LLMSERVE_SHARED(int64_t, scratch, kSamplingThreads / kWarpSize);
  LLMSERVE_SHARED(int, flag, 1);
  const int64_t row = blockIdx.y;
  const int segment = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const SamplingRow& params = call.params[row];
  RowState& state = call.workspace.state(row);
  if (!state.is_drawn) return;
  Filter filter = state.filters[step];
  Filter& next_filter = state.filters[step + 1];
  if (is_first) {
    filter.prefix = 0;
    filter.above = 0;
    filter.is_searching = !is_off<kByWeight>(params, call.logits.vocab_size);
  }
  if (!filter.is_searching) {
    if (segment == 0 && thread == 0) next_filter = filter;
    return;
  }
  const uint32_t prefix = filter.prefix;
  const uint32_t floor_key = filter.floor_key;
  const Weigher weigh{state.max, state.inv_temperature};
  int64_t* const bins = call.workspace.bins(row);

  const uint32_t best_key = static_cast<uint32_t>(call.workspace.segments(row)[segment].best >> 32);
  if (best_key >= ::llmserve::cuda::max(prefix, floor_key)) {
    for (int bin = thread; bin < kNumBins; bin += kSamplingThreads) {
      low[bin] = 0;
      if constexpr (kByWeight) high[bin] = 0;
    }
    block_sync();
    for_each_logit(call.row_of_logits(row), segment, [&](float logit, int) {
      const uint32_t key = key_of(logit);
      if (key < floor_key || !digit.is_in_group(key, prefix)) return;
      const int bin = digit.bin(key);
      if constexpr (kByWeight) {
        const int64_t weight = weigh(logit);
        const unsigned low_part = static_cast<unsigned>(weight & ((1 << kLowBits) - 1));
        const unsigned high_part = static_cast<unsigned>(weight >> kLowBits);
        if (low_part != 0) atomic_add(&low[bin], low_part);
        if (high_part != 0) atomic_add(&high[bin], high_part);
      } else {
        atomic_add(&low[bin], 1u);
      }
    });
    block_sync();
    for (int bin = thread; bin < kNumBins; bin += kSamplingThreads) {
      int64_t sum = low[bin];
      if constexpr (kByWeight) sum += int64_t{high[bin]} << kLowBits;
      if (sum != 0) atomic_add(&bins[bin], sum);
    }
  }
  if (!is_last_block(&state.num_finished_blocks, static_cast<int>(gridDim.x), flag)) return;

  // Thread 0 has the highest bins.
  const int top_bin = kNumBins - 1 - thread * kBinsPerThread;
  int64_t sums[kBinsPerThread];
  int64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    sums[i] = bins[top_bin - i];
    bins[top_bin - i] = 0;
    sum += sums[i];
  }
  int64_t total = 0;
  int64_t above = filter.above + sum_before(sum, scratch, &total);
  const int64_t wanted = is_first ? wanted_of<kByWeight>(params, total) : filter.wanted;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    if (above < wanted && wanted <= above + sums[i]) {
      next_filter = descend<kByWeight>(filter, digit, top_bin - i, above, wanted);
    }
    above += sums[i];
  }
  if (thread == 0 && filter.above + total < wanted) {  // fewer tokens than top_k: all stay
    filter.is_searching = 0;
    next_filter = filter;
  }
}

}  // namespace

void launch_search(const SamplingCall& call, int step, bool is_by_weight, Stream stream) {
  const auto kernel = is_by_weight ? search_kernel<true> : search_kernel<false>;
  for (int i = 0; i < kNumDigits; ++i) {
    launch(kernel, sampling_grid(call.logits.vocab_size, call.logits.num_rows),
           Dim3(kSamplingThreads), 0, stream, call, kDigits[i], step + i,
           i == 0);
  }
}

}  // namespace llmserve::cuda
