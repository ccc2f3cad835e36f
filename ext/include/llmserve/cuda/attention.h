// Paged attention on CUDA, and what writes nothing but its output and a workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmserve/cuda/stream.h"
#include "llmserve/cuda/types.h"

namespace llmserve::cuda {

// What a call works on; passed to the kernels by value. All pointers are device addresses.
struct AttentionArgs {
  const void* q;  // [num_tokens, num_heads, head_dim] of `type`, head_dim contiguous
  int64_t q_token_stride;
  int64_t q_head_stride;
  const void* k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim] of `cache_type`, blocks
  const void* v_cache;  // contiguous and `*_block_stride` elements apart
  int64_t k_block_stride;
  int64_t v_block_stride;
  const float* k_scale;  // [num_kv_heads]: what stored values are multiplied with; null: 1
  const float* v_scale;
  const float* sinks;  // [num_heads]: a logit beside those of keys, without a value; null: none
  const int32_t* block_tables;  // [num_seqs, max_blocks], rows `table_stride` apart
  int64_t table_stride;
  const int32_t* seq_lens;      // [num_seqs], 0: a sequence that is padding
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  void* out;                    // [num_tokens, num_heads, head_dim] of `type`, contiguous
  float* workspace;             // attention_workspace_bytes(), a multiple of 16
  DType type;                   // float32, float16 or bfloat16
  DType cache_type;
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // a multiple of 16 / sizeof(element of the cache), at most 256
  int32_t block_size;
  int32_t max_query_len;   // of any sequence
  int32_t max_seq_len;     // of any sequence; a captured graph has that of its later replays
  int32_t sliding_window;  // 0: none
  float scale;
  float logit_softcap;  // 0: none
};

// Bytes of AttentionArgs::workspace; of args, only sizes are read. 0: none is needed.
size_t attention_workspace_bytes(const AttentionArgs& args);

// Launches up to three kernels: the sequences with one query, the reduction of their splits, and
// all other sequences. Reads no device memory on the host. Tokens behind the last sequence, and
// queries that see no key, get zeros.
void paged_attention(const AttentionArgs& args, Stream stream);

}  // namespace llmserve::cuda
