// What the sampling kernels share: how they see a row of logits, the weights of its tokens, and
// sums over a block. Included by .cu files.
#pragma once

#include "llmserve/cuda/device.h"
#include "llmserve/cuda/sampling.h"

namespace llmserve::cuda {

constexpr int kSamplingThreads = 256;
constexpr int kVector = 4;  // logits of 16 bytes
constexpr int kVectorsPerThread = kSegment / kSamplingThreads / kVector;
static_assert(kMaxSegments <= kSamplingThreads, "one thread per segment where a row is summed up");

constexpr float kMinusInfinity = -INFINITY;

// A key orders as its logit does. -0 counts as 0.
LLMSERVE_DEVICE uint32_t key_of(float logit) {
  const uint32_t bits = float_to_bits(logit + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

LLMSERVE_DEVICE float logit_of(uint32_t key) {
  return bits_to_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A token in one number that orders by logit, then by lower id.
LLMSERVE_DEVICE uint64_t ranked(float logit, int id) {
  return uint64_t{key_of(logit)} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
LLMSERVE_DEVICE int id_of(uint64_t ranked) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(ranked));
}
LLMSERVE_DEVICE float logit_of(uint64_t ranked) {
  return logit_of(static_cast<uint32_t>(ranked >> 32));
}

// Weights are multiples of 2^-kWeightBits of the best token's: integers, whose sums need no order.
// The sum of a segment has at most 52 bits, that of a row at most 60. Rounding a weight to such a
// multiple takes less than rounding its exponential did, but where it is below 2^-17; and the tail
// of a vocabulary of 2^18 tokens below that errs by less than 2^-22 in all.
constexpr int kWeightBits = 39;

struct Weigher {
  float max;
  float inv_temperature;

  LLMSERVE_DEVICE int64_t operator()(float logit) const {
    constexpr float kOne = 549755813888.0f;  // 2^39
    if (logit == max) return int64_t{1} << kWeightBits;  // also where 1 / temperature is infinite
    return llrintf(expf((logit - max) * inv_temperature) * kOne);
  }
};

// One row of logits under its mask.
class RowOfLogits {
 public:
  const float* logits;
  const uint32_t* mask;  // null: none
  int64_t num_mask_words;
  int vocab_size;
  bool is_vectorized;  // logits are 16-byte aligned

  // Logits of kVectorsPerThread vectors of one segment, `stride` apart; -inf where forbidden or
  // past the vocabulary. `first` is a multiple of 4.
  LLMSERVE_DEVICE void load(int segment, int first, int stride,
                            float (&x)[kVectorsPerThread][kVector]) const {
    if (is_vectorized && (segment + 1) * kSegment <= vocab_size) {
#pragma unroll
      for (int v = 0; v < kVectorsPerThread; ++v) {
        unpack<float>(load16(logits + first + v * stride), x[v]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectorsPerThread; ++v) load_cautiously(first + v * stride, x[v]);
    }
    if (mask == nullptr) return;
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) apply_mask(first + v * stride, x[v]);
  }

 private:
  LLMSERVE_DEVICE void load_cautiously(int i, float (&x)[kVector]) const {
    if (is_vectorized && i + kVector <= vocab_size) {
      unpack<float>(load16(logits + i), x);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = i + j < vocab_size ? logits[i + j] : kMinusInfinity;
  }

  LLMSERVE_DEVICE void apply_mask(int i, float (&x)[kVector]) const {
    const uint32_t bits = i / 32 < num_mask_words ? mask[i / 32] >> i % 32 : 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (!(bits >> j & 1)) x[j] = kMinusInfinity;
    }
  }
};

LLMSERVE_DEVICE RowOfLogits row_of_logits(const Logits& logits, const Masks& masks, int64_t row,
                                          bool is_vectorized) {
  RowOfLogits result{logits.data + row * logits.row_stride, nullptr, masks.num_words,
                     static_cast<int>(logits.vocab_size), is_vectorized};
  if (masks.ids != nullptr && masks.ids[row] >= 0) {
    result.mask = masks.words + masks.ids[row] * masks.num_words;
  }
  return result;
}

// Calls f(logit, id) for the thread's share of a segment; neighbours in id are read by neighbouring
// threads. Past the vocabulary logits are -inf.
template <typename F>
LLMSERVE_DEVICE void for_each_logit(const RowOfLogits& row, int segment, const F& f) {
  float x[kVectorsPerThread][kVector];
  constexpr int kStride = kSamplingThreads * kVector;
  const int first = segment * kSegment + static_cast<int>(threadIdx.x) * kVector;
  row.load(segment, first, kStride, x);
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) f(x[v][j], first + v * kStride + j);
  }
}

// Sums over the block, in the order of threads: returns what lies before the thread, and the total.
// scratch: one value per warp.
LLMSERVE_DEVICE int64_t sum_before(int64_t value, Shared<int64_t> scratch, int64_t* total) {
  int64_t sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t below = shuffle_up(sum, distance);
    if (lane_id() >= distance) sum += below;
  }
  block_sync();
  if (lane_id() == kWarpSize - 1) scratch[warp_id()] = sum;
  block_sync();
  int64_t before = 0;
  *total = 0;
#pragma unroll
  for (int w = 0; w < kSamplingThreads / kWarpSize; ++w) {
    if (w < warp_id()) before += scratch[w];
    *total += scratch[w];
  }
  return before + sum - value;
}

// Largest value of the block, for every thread. scratch: one value per warp.
LLMSERVE_DEVICE uint64_t block_max_ranked(uint64_t value, Shared<uint64_t> scratch) {
  value = group_max<kWarpSize>(value);
  block_sync();
  if (lane_id() == 0) scratch[warp_id()] = value;
  block_sync();
#pragma unroll
  for (int w = 0; w < kSamplingThreads / kWarpSize; ++w) value = max(value, scratch[w]);
  return value;
}

// Whether the block is the last of `num_blocks` to get here; it then sees what all of them wrote.
// The counter is zero before and after.
LLMSERVE_DEVICE bool is_last_block(int* counter, int num_blocks, Shared<int> flag) {
  thread_fence();
  block_sync();
  if (threadIdx.x == 0) {
    flag[0] = atomic_add(counter, 1) == num_blocks - 1;
    if (flag[0]) atomic_add(counter, -num_blocks);
  }
  block_sync();
  thread_fence();
  return flag[0];
}

constexpr uint64_t kInvalidBest = ~uint64_t{0};  // above every token's

// The thread's part of the best token of a segment, or kInvalidBest if it saw a NaN or +inf.
LLMSERVE_DEVICE uint64_t best_of_thread(const RowOfLogits& row, int segment) {
  float best = kMinusInfinity;
  int best_id = segment * kSegment + static_cast<int>(threadIdx.x) * kVector;
  bool is_valid = true;
  for_each_logit(row, segment, [&](float logit, int id) {
    is_valid &= logit < INFINITY;
    if (logit > best) {
      best = logit;
      best_id = id;
    }
  });
  return is_valid ? ranked(best, best_id) : kInvalidBest;
}

inline bool is_vectorizable(const Logits& logits) {
  return reinterpret_cast<uintptr_t>(logits.data) % sizeof(Vec16) == 0 &&
         logits.row_stride % kVector == 0;
}

inline int64_t num_segments_of(int64_t vocab_size) {
  return ceil_div<int64_t>(vocab_size, kSegment);
}

}  // namespace llmserve::cuda
