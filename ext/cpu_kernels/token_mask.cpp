// Applies masks without unpacking them; see token_mask.h for what is promised.
//
// Grammars allow few tokens or nearly all, so most runs of 64 tokens are alike: they are filled or
// left as they are, and not even read.
#include "llmserve/token_mask.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "llmserve/parallel.h"

namespace llmserve {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kRun = 64;

bool is_allowed(const uint8_t* bits, int64_t i) { return bits[i / 8] >> (i % 8) & 1; }

using Words4 = uint32_t __attribute__((vector_size(16)));

// By vectors, because which tokens of a mixed run are allowed no processor can predict.
void mask_four(float* logits, uint32_t bits) {
  const Words4 is_set = (Words4{bits, bits, bits, bits} & Words4{1, 2, 4, 8}) != 0;
  constexpr uint32_t kBits = 0xff800000;  // of -inf
  Words4 words;
  std::memcpy(&words, logits, sizeof(words));
  words = (words & is_set) | (Words4{kBits, kBits, kBits, kBits} & ~is_set);
  std::memcpy(logits, &words, sizeof(words));
}

void mask_row(float* row, int64_t vocab_size, const TokenMask& mask) {
  const int64_t size = std::min(vocab_size, mask.num_bytes * 8);
  const int64_t num_runs = size / kRun;
  for (int64_t r = 0; r < num_runs; ++r) {
    const uint8_t* bytes = mask.bits + r * (kRun / 8);
    float* logits = row + r * kRun;
    uint64_t all;
    std::memcpy(&all, bytes, sizeof(all));
    if (all == ~uint64_t{0}) continue;
    if (all == 0) {
      std::fill_n(logits, kRun, kForbidden);
      continue;
    }
    for (int64_t b = 0; b < kRun / 8; ++b) {
      mask_four(logits + b * 8, bytes[b]);
      mask_four(logits + b * 8 + 4, bytes[b] >> 4);
    }
  }
  for (int64_t i = num_runs * kRun; i < size; ++i) {
    if (!is_allowed(mask.bits, i)) row[i] = kForbidden;
  }
  std::fill(row + size, row + vocab_size, kForbidden);
}

}  // namespace

void apply_token_masks(float* logits, int64_t row_stride, int64_t vocab_size,
                       const int64_t* row_ids, const TokenMask* masks, int64_t num_masks) {
  parallel_for(num_masks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      mask_row(logits + row_ids[i] * row_stride, vocab_size, masks[i]);
    }
  });
}

}  // namespace llmserve
