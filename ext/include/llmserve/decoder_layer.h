// The layers of a decoder in one call: the kernels of the other headers, in the order in which
// llmserve/layers calls them, so that a step of one token does not wait for an interpreter between
// operations of a few microseconds.
#pragma once

#include <cstdint>
#include <vector>

#include "llmserve/attention.h"
#include "llmserve/elementwise.h"
#include "llmserve/linear.h"

namespace llmserve {

struct StackedParts {
  const LinearPart* parts;
  int64_t num_parts;
};

// Weights of norms are [size] floats; null where a layer has none.
struct DecoderLayer {
  StackedParts qkv, output, gate_up, down;
  const float* q_norm;
  const float* k_norm;
  bool is_qk_norm_per_head;  // else over all heads of a token
  const float* cos;          // null: no rotary embedding
  const float* sin;
  int64_t max_positions, half_dim;
  bool is_interleaved;
  const float* post_attention_norm;
  const float* pre_mlp_norm;
  const float* post_mlp_norm;
  const float* next_norm;  // the input norm of the next layer, or the last one of the model
  float norm_eps, norm_weight_offset;
  float residual_scale;  // of what is added to the residual stream
  Activation activation;
  int64_t hidden_size, intermediate_size;
  int64_t num_heads, num_kv_heads, head_dim;
  float attention_scale;
  int64_t sliding_window;  // 0: none
  float logit_softcap;     // 0: none
};

// What a step's tokens are for a KV cache group. Callers fill it as seven numbers of 64 bits.
struct StepInputs {
  const int64_t* positions;     // [num_tokens]
  const int64_t* slot_mapping;  // [num_tokens]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t table_stride;
  int64_t max_blocks;
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
};
static_assert(sizeof(StepInputs) == 7 * sizeof(int64_t));

// Where a layer keeps K and V. Callers fill it as five numbers of 64 bits.
struct LayerCacheView {
  int64_t group_id;  // of the StepInputs that belong to it
  CacheView k, v;
};
static_assert(sizeof(LayerCacheView) == 5 * sizeof(int64_t));

struct DecoderStep {
  const StepInputs* groups;
  const LayerCacheView* caches;  // one per layer
  CacheType cache_type;
  int64_t num_blocks, block_size;
  int64_t num_tokens, num_seqs;
};

// Memory for values that live within a layer, float [num_tokens, ...] each.
struct LayerBuffers {
  float* qkv;
  float* intermediate;  // what attention gives, then what the activation gives
  float* attention_out;  // [hidden_size]
  float* gate_up;
  float* mlp_out;  // [hidden_size]
};

// x, residual: [num_tokens, hidden_size], the first layer's normalised input and the residual
// stream, which grows in place. Returns the last norm's result: mlp_out, or residual if the last
// layer has no next_norm. Raises what the kernels raise.
const float* run_decoder_layers(const std::vector<DecoderLayer>& layers, const DecoderStep& step,
                                const LayerBuffers& buffers, const float* x, float* residual);

}  // namespace llmserve
