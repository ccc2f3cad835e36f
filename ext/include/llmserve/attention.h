// Paged attention on a CPU, and what writes the KV cache that it reads.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "llmserve/cache_types.h"

namespace llmserve {

// K or V of all blocks: [num_blocks, block_size, num_kv_heads, head_dim], blocks `block_stride`
// elements apart, contiguous within a block.
struct CacheView {
  void* data;
  int64_t block_stride;
};

struct AttentionArgs {
  const float* q;  // [num_tokens, num_heads, head_dim], head_dim contiguous
  int64_t q_token_stride;
  int64_t q_head_stride;
  CacheView k_cache;
  CacheView v_cache;
  CacheType cache_type;
  int64_t num_blocks;
  int64_t block_size;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t table_stride;
  int64_t max_blocks;
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  float* out;                   // [num_tokens, num_heads, head_dim], contiguous
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
  int64_t sliding_window;  // 0: none
  float logit_softcap;     // 0: none
};

// Raises std::invalid_argument if lengths contradict each other and std::out_of_range if a block
// table names a block that does not exist; the output is then undefined.
void paged_attention(const AttentionArgs& args);

struct WriteKVArgs {
  const float* k;  // [num_tokens, num_kv_heads, head_dim], head_dim contiguous
  const float* v;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  CacheView k_cache;
  CacheView v_cache;
  CacheType cache_type;
  int64_t num_blocks;
  int64_t block_size;
  const void* slot_mapping;  // [num_tokens], int64 or int32; -1 skips the token
  bool is_slot_int64;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_dim;
};

// Rounds to the nearest, ties to even; float16 saturates at +-65504. Raises std::out_of_range if a
// slot does not exist; then nothing is written.
void write_kv(const WriteKVArgs& args);

// Copies blocks of `block_bytes` within a cache tensor, in the order of the list. Raises
// std::out_of_range if a block does not exist; then nothing is copied.
void copy_blocks(void* cache, int64_t block_stride_bytes, int64_t block_bytes, int64_t num_blocks,
                 const std::vector<std::pair<int64_t, int64_t>>& block_copies);

}  // namespace llmserve
