// What the kernels of sample_rows leave for each other in the workspace. Included by .cu files.
//
//   maxima   every row's best token; greedy rows are done. min_p becomes a lowest key.
//   search   three times for top_k, three times for top_p: the digits of the key at which the
//            number of tokens, or their weight, reaches what is wanted. No token is sorted.
//   draw     the weight that each segment keeps, then the token.
#pragma once

#include "llmserve/cuda/sampling_row.h"

namespace llmserve::cuda {

// Digits of a key, from the highest.
constexpr int kNumDigits = 3;
constexpr int kMaxDigitBits = 11;
constexpr int kNumBins = 1 << kMaxDigitBits;

// What filters have found out so far. Every search kernel reads one and writes the next, so that no
// block reads what another one writes.
struct Filter {
  float threshold;     // as in SampledRow
  uint32_t floor_key;  // tokens below are out, and so are those of -inf
  // The search: the digits found so far, zeros below; above the tokens that begin with them lies
  // `above` of the `wanted` weight or number of tokens.
  uint32_t prefix;
  int32_t is_searching;
  int32_t has_top_p;  // top_p has found all of `prefix`: the last token kept has that key
  int64_t above;
  int64_t wanted;
};

// Nothing of two rows shares a cache line of 128 bytes.
struct alignas(128) RowState {
  float max;
  float inv_temperature;
  int32_t is_drawn;  // a token has to be drawn
  int32_t num_finished_blocks;
  Filter filters[2 * kNumDigits + 1];
};

struct SegmentSum {
  uint64_t best;
  int64_t weight;  // of the tokens above `prefix` that are kept
  int64_t num_ties;
};

// One row after the other, each a RowState, kNumBins bins, which are zero between kernels, and its
// segments. Where a row lies does not hang on the number of rows, so its zeros stay where they are.
struct SamplingWorkspace {
  uint8_t* rows;
  int64_t row_bytes;

  LLMSERVE_DEVICE RowState& state(int64_t row) const {
    return *reinterpret_cast<RowState*>(rows + row * row_bytes);
  }
  LLMSERVE_DEVICE int64_t* bins(int64_t row) const {
    return reinterpret_cast<int64_t*>(&state(row) + 1);
  }
  LLMSERVE_DEVICE SegmentSum* segments(int64_t row) const {
    return reinterpret_cast<SegmentSum*>(bins(row) + kNumBins);
  }
};

// What all kernels of a call get.
struct SamplingCall {
  Logits logits;
  Masks masks;
  const SamplingRow* params;
  int32_t stages;
  SampledRow* out;
  SamplingWorkspace workspace;
  bool is_vectorized;

  LLMSERVE_DEVICE RowOfLogits row_of_logits(int64_t row) const {
    return ::llmserve::cuda::row_of_logits(logits, masks, row, is_vectorized);
  }
};

void launch_maxima(const SamplingCall& call, Stream stream);
// Read filter `step`; the search goes on for kNumDigits steps.
void launch_search(const SamplingCall& call, int step, bool is_by_weight, Stream stream);
void launch_draw(const SamplingCall& call, int step, Stream stream);

// Segments side by side, rows below each other.
inline Dim3 sampling_grid(int64_t vocab_size, int64_t num_rows) {
  return Dim3(static_cast<unsigned>(num_segments_of(vocab_size)), static_cast<unsigned>(num_rows));
}

}  // namespace llmserve::cuda
