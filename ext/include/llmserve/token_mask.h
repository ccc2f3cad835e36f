// Masks of tokens, one bit each, applied to rows of logits.
#pragma once

#include <cstdint>

namespace llmserve {

// Token i is allowed if bit i % 8 of bits[i / 8] is set; tokens beyond the mask are not.
struct TokenMask {
  const uint8_t* bits;
  int64_t num_bytes;
};

// Sets the logits of tokens that masks[i] does not allow to -inf in row row_ids[i], for each i.
// logits float32 [num_rows, vocab_size], rows `row_stride` floats apart; row_ids are distinct.
void apply_token_masks(float* logits, int64_t row_stride, int64_t vocab_size,
                       const int64_t* row_ids, const TokenMask* masks, int64_t num_masks);

}  // namespace llmserve
