// Sampling and log-probabilities of rows of logits, without sorting a vocabulary.
//
// Every row is worked on alone and in a fixed order, so its results depend on neither the other
// rows nor the number of threads.
#pragma once

#include <array>
#include <cstdint>

namespace llmserve {

// How one row is sampled. Mirrored by SAMPLING_ROW in llmserve/kernels/reference_sampling.py.
struct SamplingRow {
  double temperature;  // 0: greedy, and the filters are off
  double top_p;        // 1: off
  double min_p;        // 0: off
  int64_t top_k;       // 0: off
  uint64_t seed;       // key of the generator
  uint64_t counter;    // which draw of that key: the index of the output token
};
static_assert(sizeof(SamplingRow) == 48, "the Python side lays it out without padding");

enum class RowStatus : uint8_t {
  kOk = 0,
  kInvalid = 1,  // a NaN or +inf among the logits
  kEmpty = 2,    // every logit is -inf
};

// One sampled row. The tokens that the filters kept are those with a logit above `threshold` and,
// of those equal to it, the ones with an id up to `last_tie_id`.
struct SampledRow {
  float threshold;
  int32_t last_tie_id;
  int32_t token_id;
  RowStatus status;
};

// Token i may be sampled if bit i % 8 of bits[i / 8] is set; tokens beyond the mask may not. Without
// bits all may.
struct TokenMask {
  const uint8_t* bits;
  int64_t num_bytes;
};

using PhiloxBlock = std::array<uint32_t, 4>;

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).
PhiloxBlock philox4x32(PhiloxBlock counter, std::array<uint32_t, 2> key);

// The `counter`-th uniform number of `seed`, in [0, 1), with 53 random bits.
double uniform_at(uint64_t seed, uint64_t counter);

// logits float32 [num_rows, vocab_size], rows `row_stride` floats apart; row r is sampled as
// params[r] says. Filters in vLLM's order: temperature, min_p, top_k, top_p. Then one uniform
// number goes through the inverse CDF of the kept tokens in id order. vocab_size >= 1.
// masks: one per row, or null. Logits of tokens that a mask forbids count as -inf; some are set so.
void sample_rows(float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                 const SamplingRow* params, const TokenMask* masks, SampledRow* out);

// log_softmax of the rows row_ids[0..num_rows) of logits, at token_ids[i] and at the top_k most
// likely tokens (best first, ties by lower id), and the rank of token_ids[i] in that order, from 1.
// Outputs: logprobs double [num_rows], ranks int32 [num_rows], top_ids int32 [num_rows, top_k],
// top_logprobs double [num_rows, top_k]. A row with a NaN, a +inf or no finite logit gives NaN and
// the first ids. top_k <= vocab_size.
void logprob_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                  const int32_t* row_ids, const int32_t* token_ids, int64_t top_k, double* logprobs,
                  int32_t* ranks, int32_t* top_ids, double* top_logprobs);

}  // namespace llmserve
