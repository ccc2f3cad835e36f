// What the attention kernels share: which keys a query sees, how keys are divided into splits, how
// products become exponents of two, and how a stored element becomes an operand.
#pragma once

#include "llmserve/cuda/attention.h"
#include "llmserve/cuda/device.h"

namespace llmserve::cuda {

// The keys of a sequence with one query are divided into splits that blocks work on independently
// (Dao et al., "Flash-Decoding for long-context inference", 2023). A split's length follows from
// the number of keys that the query sees and from nothing else, so that a row has the same bits in
// any batch. There are at most kMaxSplits, which bounds the workspace whatever the context.
constexpr int kMinSplitLength = 256;
constexpr int kMaxSplits = 64;

// Query heads that a decoding block serves: the columns of one tensor-core product. Larger groups
// take several blocks, neighbours in the grid, which find each other's keys in L2.
constexpr int kHeadsPerBlock = 8;

// Tiles of keys start at multiples of it, and so does everything that divides keys: a tile lies
// within a block, whose size is a multiple of it.
constexpr int kTileKeys = 16;

constexpr float kLog2E = 1.4426950408889634f;

// Half-open range of keys.
struct KeyRange {
  int begin;
  int end;
};

// The keys that a query at `position` sees: none if that is negative.
LLMSERVE_BOTH KeyRange visible_keys(int position, int sliding_window) {
  const int end = max(position + 1, 0);
  return {sliding_window > 0 ? max(end - sliding_window, 0) : 0, end};
}

struct Splits {
  int begin;   // a multiple of length, at or before the first visible key
  int length;  // in keys
  int count;
};

LLMSERVE_BOTH Splits divide_keys(KeyRange visible) {
  int length = kMinSplitLength;
  // One less than kMaxSplits, as the first split may begin before the first visible key.
  while (visible.end - visible.begin > (kMaxSplits - 1) * length) length *= 2;
  const int begin = visible.begin / length * length;
  return {begin, length, ceil_div(visible.end - begin, length)};
}

// Splits of any sequence up to max_seq_len.
LLMSERVE_BOTH int max_splits(int max_seq_len, int sliding_window) {
  const bool is_windowed = sliding_window > 0 && sliding_window < max_seq_len;
  const int visible = is_windowed ? sliding_window : max_seq_len;
  if (visible > (kMaxSplits - 1) * kMinSplitLength) return kMaxSplits;
  return max(ceil_div(visible, kMinSplitLength) + (is_windowed ? 1 : 0), 1);
}

// Where a split leaves its numbers: `out` [num_seqs, num_heads, max_splits, head_dim] is not yet
// divided by the denominators; `stats` [num_seqs, num_heads, max_splits, 2] are the maximum, in the
// domain of log2, and the denominator.
struct Partials {
  float* out;
  float* stats;
};

LLMSERVE_BOTH int64_t partial_row(const AttentionArgs& args, int max_splits, int seq, int head) {
  return (static_cast<int64_t>(seq) * args.num_heads + head) * max_splits;
}

LLMSERVE_BOTH Partials partials(const AttentionArgs& args, int max_splits) {
  const int64_t rows = partial_row(args, max_splits, args.num_seqs, 0);
  return {args.workspace, args.workspace + rows * args.head_dim};
}

// From a product of query and key to the logit times log2(e), so that softmax takes powers of two:
// scale * x, or with a soft-cap c, c * tanh(scale * x / c). As tanh(y) = 1 - 2 / (1 + exp(2 y))
// loses relative precision near 0, the error is absolute: c * 2^-23, below that of x.
struct Logit {
  float multiplier;
  float cap;  // 0: none

  LLMSERVE_DEVICE Logit(const AttentionArgs& args, float key_scale) {
    multiplier = args.scale * key_scale * kLog2E;
    cap = args.logit_softcap * kLog2E;
    if (cap > 0.0f) multiplier *= 2.0f / args.logit_softcap;
  }

  LLMSERVE_DEVICE float operator()(float product) const {
    return cap > 0.0f ? capped(product) : product * multiplier;
  }

  LLMSERVE_DEVICE float capped(float product) const {
    return cap * (1.0f - fast_divide(2.0f, 1.0f + fast_exp2(product * multiplier)));
  }
};

// What to subtract from logits: the maximum, or 0 where nothing has been seen, as -inf - -inf is
// NaN.
LLMSERVE_DEVICE float finite_max(float m) { return m == -INFINITY ? 0.0f : m; }

// What a row is multiplied with at its end: 1 / (denominator + sink), both relative to the maximum
// m, or 0 if the row has seen no key. A sink far above m may make exp2 infinite, and the factor 0.
LLMSERVE_DEVICE float normalizer(const AttentionArgs& args, int head, float m, float denominator) {
  if (m == -INFINITY) return 0.0f;
  if (args.sinks != nullptr) denominator += fast_exp2(args.sinks[head] * kLog2E - m);
  return 1.0f / denominator;
}

// Elements of the cache as operands of tensor cores. float16 and bfloat16 are taken as they are.
// e4m3 becomes float16, as its bits moved by one: that is the value times 2^-8, exactly (e4m3 has a
// bias of 7, float16 of 15), also of subnormals; the factor goes into the scales. One 32-bit word
// has four elements; `even` takes the first and third, `odd` the others, which needs no permutation
// of bytes.
template <typename Cache>
constexpr bool kIsFp8 = sizeof(Cache) == 1;

template <typename Cache>
constexpr float kOperandScale = kIsFp8<Cache> ? 256.0f : 1.0f;

LLMSERVE_DEVICE uint32_t even_fp8(uint32_t word) {
  return ((word << 8) & 0x80008000u) | ((word << 7) & 0x3f803f80u);
}

LLMSERVE_DEVICE uint32_t odd_fp8(uint32_t word) {
  return (word & 0x80008000u) | ((word >> 1) & 0x3f803f80u);
}

LLMSERVE_DEVICE float head_scale(const float* scales, int kv_head) {
  return scales == nullptr ? 1.0f : scales[kv_head];
}

// An element of q or the output where its type is known only at run time.
LLMSERVE_DEVICE float load_element(const void* data, DType type, int64_t i) {
  if (type == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (type == DType::kFloat16) return to_float(static_cast<const half*>(data)[i]);
  return to_float(static_cast<const bfloat16*>(data)[i]);
}

LLMSERVE_DEVICE void store_element(void* data, DType type, int64_t i, float x) {
  if (type == DType::kFloat32) {
    static_cast<float*>(data)[i] = x;
  } else if (type == DType::kFloat16) {
    static_cast<half*>(data)[i] = from_float<half>(x);
  } else {
    static_cast<bfloat16*>(data)[i] = from_float<bfloat16>(x);
  }
}

// Stores two neighbours; i is even.
LLMSERVE_DEVICE void store_pair(void* data, DType type, int64_t i, float low, float high) {
  if (type == DType::kFloat32) {
    static_cast<float*>(data)[i] = low;
    static_cast<float*>(data)[i + 1] = high;
    return;
  }
  static_cast<uint32_t*>(data)[i / 2] =
      type == DType::kFloat16 ? pack_pair<half>(low, high) : pack_pair<bfloat16>(low, high);
}

// Elements between rows of a tile in shared memory: an odd number of 16-byte pieces, so that eight
// rows, which tensor cores load at a time, lie in all banks.
template <typename T>
LLMSERVE_BOTH constexpr int tile_pitch(int head_dim) {
  constexpr int kPiece = 16 / sizeof(T);
  return (head_dim / kPiece | 1) * kPiece;
}

// The query heads of one block in a grid of decode_grid().
struct HeadSet {
  int kv_head;
  int first_head;
  int num_heads;
};

LLMSERVE_DEVICE HeadSet find_heads(const AttentionArgs& args, int index) {
  const int group = args.num_heads / args.num_kv_heads;
  const int blocks_per_group = ceil_div(group, kHeadsPerBlock);
  const int in_group = index % blocks_per_group * kHeadsPerBlock;
  return {index / blocks_per_group, index / blocks_per_group * group + in_group,
          min(group - in_group, kHeadsPerBlock)};
}

// The query of a sequence that decodes: a sequence with one query.
struct DecodeRow {
  int token;  // -1: the sequence has no query, or several
  int seq_len;
};

// A sequence without queries stands for the token of its number if that is behind all sequences:
// batches are padded at their end, and these tokens get zeros.
LLMSERVE_DEVICE DecodeRow decode_row(const AttentionArgs& args, int seq) {
  const int begin = args.cu_seqlens_q[seq];
  const int num_queries = args.cu_seqlens_q[seq + 1] - begin;
  if (num_queries == 1) return {begin, args.seq_lens[seq]};
  const bool is_padding = num_queries == 0 && seq >= args.cu_seqlens_q[args.num_seqs];
  return {is_padding && seq < args.num_tokens ? seq : -1, 0};
}

// Zeros for heads [first_head, first_head + num_heads) of a token, by the whole block.
LLMSERVE_DEVICE void store_zeros(const AttentionArgs& args, int token, int first_head,
                                 int num_heads) {
  const int64_t first = (static_cast<int64_t>(token) * args.num_heads + first_head) * args.head_dim;
  for (int i = 2 * static_cast<int>(threadIdx.x); i < num_heads * args.head_dim;
       i += 2 * static_cast<int>(blockDim.x)) {
    store_pair(args.out, args.type, first + i, 0.0f, 0.0f);
  }
}

}  // namespace llmserve::cuda
