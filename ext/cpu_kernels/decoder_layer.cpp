#include "llmserve/decoder_layer.h"

#include <cstddef>

namespace llmserve {
namespace {

void multiply(const StackedParts& weights, const float* x, float* out, int64_t num_tokens) {
  linear(x, weights.parts, weights.num_parts, out, num_tokens);
}

// Normalises rows of `size` in place, or adds x to the residual and writes the norm of the sum to x.
void norm(const DecoderLayer& layer, const float* weight, RowsView x, RowsView residual,
          int64_t num_tokens, int64_t num_heads, int64_t size) {
  rms_norm({x, residual, x, weight, num_tokens, num_heads, size, layer.norm_eps,
            layer.norm_weight_offset});
}

// The norm of q or k within rows of `row_size` values.
void norm_heads(const DecoderLayer& layer, const float* weight, float* heads, int64_t row_size,
                int64_t num_heads, int64_t num_tokens) {
  const RowsView view{heads, row_size, layer.head_dim};
  if (layer.is_qk_norm_per_head) {
    norm(layer, weight, view, {}, num_tokens, num_heads, layer.head_dim);
  } else {
    norm(layer, weight, view, {}, num_tokens, 1, num_heads * layer.head_dim);
  }
}

// One step of the residual stream. Returns the input of the next block.
const float* add_norm(const DecoderLayer& layer, const float* post, const float* pre, float* x,
                      float* residual, int64_t num_tokens) {
  const int64_t size = layer.hidden_size;
  const RowsView x_rows{x, size, size};
  if (post != nullptr) norm(layer, post, x_rows, {}, num_tokens, 1, size);
  if (layer.residual_scale != 1.0f) {
    for (int64_t i = 0; i < num_tokens * size; ++i) x[i] *= layer.residual_scale;
  }
  if (pre != nullptr) {
    norm(layer, pre, x_rows, {residual, size, size}, num_tokens, 1, size);
    return x;
  }
  for (int64_t i = 0; i < num_tokens * size; ++i) residual[i] += x[i];
  return residual;
}

// Attention before its output projection; the result is in buffers.intermediate.
void attend(const DecoderLayer& layer, const DecoderStep& step, const LayerCacheView& cache,
            const LayerBuffers& buffers, const float* x) {
  const StepInputs& inputs = step.groups[cache.group_id];
  const int64_t head_dim = layer.head_dim, n = step.num_tokens;
  const int64_t row_size = (layer.num_heads + 2 * layer.num_kv_heads) * head_dim;
  float* q = buffers.qkv;
  float* k = q + layer.num_heads * head_dim;
  float* v = k + layer.num_kv_heads * head_dim;
  multiply(layer.qkv, x, q, n);
  if (layer.q_norm != nullptr) {
    norm_heads(layer, layer.q_norm, q, row_size, layer.num_heads, n);
    norm_heads(layer, layer.k_norm, k, row_size, layer.num_kv_heads, n);
  }
  if (layer.cos != nullptr) {
    rotary({{q, row_size, head_dim},
            {k, row_size, head_dim},
            layer.num_heads,
            layer.num_kv_heads,
            inputs.positions,
            true,
            layer.cos,
            layer.sin,
            layer.max_positions,
            layer.half_dim,
            n,
            layer.is_interleaved});
  }
  write_kv({k, v, row_size, head_dim, row_size, head_dim, cache.k, cache.v, step.cache_type,
            step.num_blocks, step.block_size, inputs.slot_mapping, true, n, layer.num_kv_heads,
            head_dim});
  paged_attention({q,
                   row_size,
                   head_dim,
                   cache.k,
                   cache.v,
                   step.cache_type,
                   step.num_blocks,
                   step.block_size,
                   inputs.block_tables,
                   inputs.table_stride,
                   inputs.max_blocks,
                   inputs.seq_lens,
                   inputs.cu_seqlens_q,
                   buffers.intermediate,
                   n,
                   step.num_seqs,
                   layer.num_heads,
                   layer.num_kv_heads,
                   head_dim,
                   layer.attention_scale,
                   layer.sliding_window,
                   layer.logit_softcap});
}

}  // namespace

const float* run_decoder_layers(const std::vector<DecoderLayer>& layers, const DecoderStep& step,
                                const LayerBuffers& buffers, const float* x, float* residual) {
  const int64_t n = step.num_tokens;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = layers[i];
    attend(layer, step, step.caches[i], buffers, x);
    multiply(layer.output, buffers.intermediate, buffers.attention_out, n);
    x = add_norm(layer, layer.post_attention_norm, layer.pre_mlp_norm, buffers.attention_out,
                 residual, n);
    multiply(layer.gate_up, x, buffers.gate_up, n);
    act_mul(buffers.gate_up, 2 * layer.intermediate_size, layer.activation, buffers.intermediate,
            n, layer.intermediate_size);
    multiply(layer.down, buffers.intermediate, buffers.mlp_out, n);
    x = add_norm(layer, layer.post_mlp_norm, layer.next_norm, buffers.mlp_out, residual, n);
  }
  return x;
}

}  // namespace llmserve
