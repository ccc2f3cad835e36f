#include "llmserve/step_gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "llmserve/parallel.h"

namespace llmserve {
namespace {

void check(const SequenceRows& rows, const ScheduledRow* scheduled, int64_t num_seqs,
           const GatheredStep& step) {
  const int64_t max_blocks = std::min(rows.max_blocks, step.table_width);
  const int64_t max_len = std::min(rows.max_tokens, max_blocks * rows.block_size);
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const ScheduledRow& s = scheduled[i];
    if (s.row < 0 || s.row >= rows.num_rows || s.num_computed < 0 || s.num_scheduled < 0 ||
        s.num_computed > max_len || s.num_scheduled > max_len - s.num_computed) {
      throw std::out_of_range(std::to_string(s.num_scheduled) + " tokens of row " +
                              std::to_string(s.row) + " from " + std::to_string(s.num_computed) +
                              " on are not there");
    }
    num_tokens += s.num_scheduled;
  }
  if (num_tokens != step.num_tokens) {
    throw std::out_of_range("there are " + std::to_string(num_tokens) + " tokens, not " +
                            std::to_string(step.num_tokens));
  }
}

}  // namespace

void gather_step(const SequenceRows& rows, const ScheduledRow* scheduled, int64_t num_seqs,
                 const GatheredStep& step) {
  check(rows, scheduled, num_seqs, step);
  int64_t next = 0;
  step.cu_seqlens_q[0] = 0;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const ScheduledRow& s = scheduled[i];
    const int64_t seq_len = s.num_computed + s.num_scheduled;
    const int32_t* token_ids = rows.token_ids + s.row * rows.max_tokens;
    const int64_t num_blocks = divide_up(seq_len, rows.block_size);
    for (int64_t t = 0; t < s.num_scheduled; ++t) {
      step.positions[next + t] = s.num_computed + t;
      step.token_ids[next + t] = token_ids[s.num_computed + t];
    }
    for (int64_t g = 0; g < rows.num_groups; ++g) {
      const int32_t* table = rows.tables + (g * rows.num_rows + s.row) * rows.max_blocks;
      std::copy(table, table + num_blocks, step.tables + (g * num_seqs + i) * step.table_width);
      int64_t* slots = step.slot_mapping + g * step.num_tokens + next;
      for (int64_t t = 0; t < s.num_scheduled; ++t) {
        const int64_t position = s.num_computed + t;
        slots[t] = table[position / rows.block_size] * rows.block_size + position % rows.block_size;
      }
    }
    next += s.num_scheduled;
    step.seq_lens[i] = static_cast<int32_t>(seq_len);
    step.cu_seqlens_q[i + 1] = static_cast<int32_t>(next);
  }
}

}  // namespace llmserve
