// Launchers of what turns logits into tokens and log-probabilities on the device. The rules are
// those of llmserve/sampling.h, whose rows of parameters and results they share. Nothing is checked
// here; llmserve/kernels/cuda/sampling.py does.
//
// A row is cut into segments of kSegment logits, one block each. Weights are integers, so the sums
// of a row are the same in whatever order its blocks add them; nothing depends on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmserve/cuda/stream.h"
#include "llmserve/sampling.h"

namespace llmserve::cuda {

constexpr int kSegment = 4096;
constexpr int kMaxSegments = 256;  // of a row
constexpr int64_t kMaxVocabSize = int64_t{kSegment} * kMaxSegments;

// float32 [num_rows, vocab_size]; elements of a row adjacent.
struct Logits {
  float* data;
  int64_t row_stride;
  int64_t num_rows;
  int64_t vocab_size;  // at most kMaxVocabSize
};

// Packed masks: bit i % 32 of word i / 32 is set if token i may be sampled; tokens beyond the words
// may not. Row r has the mask ids[r], or none if that is negative.
struct Masks {
  const uint32_t* words;  // [num_masks, num_words]
  int64_t num_words;
  const int32_t* ids;  // [num_rows]; null: no row has a mask
};

// What some row of a batch may need, as bits.
enum SamplingStage : int32_t {
  kDrawStage = 1,  // a temperature
  kTopKStage = 2,
  kTopPStage = 4,
};

// Of the workspace of sample_rows. It must be zero before its first use and serves fewer rows of
// this vocab_size as well. Calls that share it must follow each other on one stream.
size_t sampling_workspace_bytes(int64_t num_rows, int64_t vocab_size);

// out[r] = one token of row r, as llmserve::sample_rows. Stages that are left out count as off in
// every row; greedy rows need none.
void sample_rows(const Logits& logits, const Masks& masks, const SamplingRow* params,
                 int32_t stages, SampledRow* out, void* workspace, Stream stream);

// last_tokens[target_rows[i]] = the token of sampled[i], if it has one and target_rows[i] >= 0.
void store_tokens(const SampledRow* sampled, const int32_t* target_rows, int32_t* last_tokens,
                  int64_t num_rows, Stream stream);

constexpr int64_t kMaxTopLogprobs = 128;

struct LogprobArgs {
  Logits logits;
  const int32_t* row_ids;  // [num_rows] of `logits`; null: row i
  const int32_t* token_ids;   // of row i: token_ids[token_rows[i] * token_stride]
  const int32_t* token_rows;  // null: i
  int64_t token_stride;
  int64_t num_rows;
  int64_t top_k;  // at most min(vocab_size, kMaxTopLogprobs)
  double* logprobs;      // [num_rows]
  int32_t* ranks;        // [num_rows]
  int32_t* top_ids;      // [num_rows, top_k]
  double* top_logprobs;  // [num_rows, top_k]
};

// Of a workspace that may hold anything.
size_t logprob_workspace_bytes(int64_t num_rows, int64_t vocab_size, int64_t top_k);

// As llmserve::logprob_rows. Token ids outside the vocabulary count as those of an invalid row.
void logprob_rows(const LogprobArgs& args, void* workspace, Stream stream);

// What is done to one row of logits before it is sampled, in this order. Ranges are of the arrays
// `ids` and `values` of edit_logits; ids outside the vocabulary are passed over, and no id occurs
// twice in a range. Mirrored by EDIT_ROW in llmserve/kernels/cuda/sampling.py.
struct EditRow {
  int32_t row;
  int32_t mask_id;  // tokens that this mask forbids become -inf; negative: none
  int32_t banned_begin, banned_end;    // tokens that become -inf
  int32_t bias_begin, bias_end;        // logit += value
  int32_t penalty_begin, penalty_end;  // value: how often the token is in the output
  float repetition_penalty;  // divides positive logits, multiplies others; 1: off
  float frequency_penalty;   // is subtracted as often as the token is in the output
  float presence_penalty;    // is subtracted if it is there
  int32_t forced_token_id;   // gets logit 0 and all others -inf; negative: none
};
static_assert(sizeof(EditRow) == 48, "the Python side lays it out without padding");

// masks.ids is not read: rows name their masks themselves. No two edits have the same row.
void edit_logits(const Logits& logits, const Masks& masks, const EditRow* edits, int64_t num_edits,
                 const int32_t* ids, const float* values, Stream stream);

}  // namespace llmserve::cuda
