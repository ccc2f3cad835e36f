// The kernels that paged_attention() chooses among, each compiled in a file of its own.
#pragma once

#include "llmserve/cuda/attention_device.h"

namespace llmserve::cuda {

// One block in x for each KV head and eight of its query heads, one in y for each sequence; the
// blocks in z take splits in turn.
inline Dim3 decode_grid(const AttentionArgs& args, int num_blocks_z) {
  const int group = args.num_heads / args.num_kv_heads;
  return Dim3(static_cast<unsigned>(args.num_kv_heads * ceil_div(group, kHeadsPerBlock)),
              static_cast<unsigned>(args.num_seqs), static_cast<unsigned>(num_blocks_z));
}

// Sequences with one query, on tensor cores. A split leaves partials, or the output if it is the
// only one of its sequence.
void decode_float16(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream);
void decode_bfloat16(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream);
void decode_fp8(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream);

// All other sequences, on tensor cores.
void prefill_float16(const AttentionArgs& args, Stream stream);
void prefill_bfloat16(const AttentionArgs& args, Stream stream);
void prefill_fp8(const AttentionArgs& args, Stream stream);

// The same two in float32 arithmetic, for all types and all multiples of 8 up to 256 as head_dim.
void decode_fma(const AttentionArgs& args, int max_splits, int num_blocks_z, Stream stream);
void prefill_fma(const AttentionArgs& args, Stream stream);

// Merges the splits of sequences that have several.
void reduce_splits(const AttentionArgs& args, int max_splits, Stream stream);

}  // namespace llmserve::cuda
