// The input of a step, gathered from the rows that a runner keeps of its sequences.
#pragma once

#include <cstdint>

namespace llmserve {

// Tokens and block tables of all sequences that a runner holds, a row each.
struct SequenceRows {
  const int32_t* token_ids;  // [num_rows, max_tokens]
  const int32_t* tables;     // [num_groups, num_rows, max_blocks]
  int64_t num_rows, max_tokens, num_groups, max_blocks, block_size;
};

// A sequence of the step: tokens [num_computed, num_computed + num_scheduled) of its row.
struct ScheduledRow {
  int64_t row, num_computed, num_scheduled;
};

// What the kernels of a step read; shapes as in StepInputs, the tables of a step being
// [num_groups, num_seqs, table_width].
struct GatheredStep {
  int64_t* token_ids;
  int64_t* positions;
  int64_t* slot_mapping;  // [num_groups, num_tokens]
  int32_t* tables;
  int64_t table_width;
  int32_t* seq_lens;
  int32_t* cu_seqlens_q;
  int64_t num_tokens;
};

// Raises std::out_of_range, with nothing written, for a sequence that its row or the arrays do not
// hold.
void gather_step(const SequenceRows& rows, const ScheduledRow* scheduled, int64_t num_seqs,
                 const GatheredStep& step);

}  // namespace llmserve
