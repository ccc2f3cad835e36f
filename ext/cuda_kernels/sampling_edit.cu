// What requests do to their logits before a token is drawn: masks, bias, penalties, forced tokens.
// One block per row. A barrier keeps each kind of edit apart from the next: an id may be in both.
#include "llmserve/cuda/sampling_row.h"

namespace llmserve::cuda {
namespace {

constexpr int kEditThreads = 512;

struct EditCall {
  Logits logits;
  Masks masks;
  const EditRow* edits;
  const int32_t* ids;
  const float* values;
  bool is_vectorized;
};

// Sets four logits to those that `kept` says and -inf.
LLMSERVE_DEVICE void forbid(float* row, int i, int vocab_size, uint32_t kept, bool is_vectorized) {
  if (kept == 0 && is_vectorized && i + kVector <= vocab_size) {
    const float nothing[kVector] = {kMinusInfinity, kMinusInfinity, kMinusInfinity,
                                    kMinusInfinity};
    store16(row + i, pack<float>(nothing));
    return;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (!(kept >> j & 1) && i + j < vocab_size) row[i + j] = kMinusInfinity;
  }
}

__global__ void __launch_bounds__(kEditThreads) edit_kernel(const EditCall call) {
  const EditRow& edit = call.edits[blockIdx.x];
  const int vocab_size = static_cast<int>(call.logits.vocab_size);
  float* const row = call.logits.data + edit.row * call.logits.row_stride;
  const int first = static_cast<int>(threadIdx.x) * kVector;
  const int step = kEditThreads * kVector;
  // Calls f(logit, value) for the tokens of a range, then waits.
  const auto for_each_id = [&](int begin, int end, const auto& f) {
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kEditThreads) {
      const int id = call.ids[i];
      if (id >= 0 && id < vocab_size) f(row[id], i);
    }
    block_sync();
  };

  if (edit.mask_id >= 0) {
    const uint32_t* const mask = call.masks.words + edit.mask_id * call.masks.num_words;
    for (int i = first; i < vocab_size; i += step) {
      const uint32_t bits = i / 32 < call.masks.num_words ? mask[i / 32] >> i % 32 & 0xf : 0;
      if (bits != 0xf) forbid(row, i, vocab_size, bits, call.is_vectorized);
    }
    block_sync();
  }
  for_each_id(edit.banned_begin, edit.banned_end,
              [](float& logit, int) { logit = kMinusInfinity; });
  for_each_id(edit.bias_begin, edit.bias_end,
              [&](float& logit, int i) { logit += call.values[i]; });
  for_each_id(edit.penalty_begin, edit.penalty_end, [&](float& logit, int i) {
    const float count = call.values[i];
    float x = logit;
    if (edit.repetition_penalty != 1.0f) {
      x = x > 0.0f ? x / edit.repetition_penalty : multiply(x, edit.repetition_penalty);
    }
    x -= multiply(edit.frequency_penalty, count);
    logit = x - (count > 0.0f ? edit.presence_penalty : 0.0f);
  });
  if (edit.forced_token_id < 0) return;
  for (int i = first; i < vocab_size; i += step) {
    forbid(row, i, vocab_size, 0, call.is_vectorized);
  }
  block_sync();
  if (threadIdx.x == 0 && edit.forced_token_id < vocab_size) row[edit.forced_token_id] = 0.0f;
}

}  // namespace

void edit_logits(const Logits& logits, const Masks& masks, const EditRow* edits, int64_t num_edits,
                 const int32_t* ids, const float* values, Stream stream) {
  const EditCall call{logits, masks, edits, ids, values, is_vectorizable(logits)};
  launch(edit_kernel, Dim3(static_cast<unsigned>(num_edits)), Dim3(kEditThreads), 0, stream, call);
}

}  // namespace llmserve::cuda
