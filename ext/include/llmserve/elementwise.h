// Operations on single rows or elements: norm, rotary embedding, gated activation, soft-cap. A row
// is computed whole by one thread, in an order that depends on its length alone.
#pragma once

#include <cstdint>

namespace llmserve {

// Rows [num_tokens, num_heads] of contiguous floats.
struct RowsView {
  float* data;
  int64_t token_stride;
  int64_t head_stride;

  float* row(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

struct RMSNormArgs {
  RowsView x;         // only read
  RowsView residual;  // data nullptr: none
  RowsView out;       // may be x or residual
  const float* weight;  // [size]
  int64_t num_tokens;
  int64_t num_heads;
  int64_t size;
  float eps;
  float weight_offset;
};

// Without residual out = norm(x), else residual += x and out = norm(residual), where
// norm(x) = x / sqrt(mean(x^2) + eps) * (weight_offset + weight).
void rms_norm(const RMSNormArgs& args);

struct RotaryArgs {
  RowsView q;
  RowsView k;
  int64_t num_q_heads;
  int64_t num_k_heads;
  const void* positions;  // [num_tokens], int64 or int32
  bool is_position_int64;
  const float* cos;  // [max_positions, half_dim], contiguous
  const float* sin;
  int64_t max_positions;
  int64_t half_dim;
  int64_t num_tokens;
  bool is_interleaved;  // pairs (0, 1), (2, 3), ... rather than (0, half_dim), (1, half_dim + 1)
};

// Rotates the first 2 * half_dim values of each head in place. Raises std::out_of_range if a
// position has no row in the tables; then nothing is changed.
void rotary(const RotaryArgs& args);

enum class Activation { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// out[token][i] = activation(gate_up[token][i]) * gate_up[token][size + i]
void act_mul(const float* gate_up, int64_t token_stride, Activation activation, float* out,
             int64_t num_tokens, int64_t size);

// x = cap * tanh(x / cap)
void softcap(float* x, int64_t count, float cap);

// The parts that exist once per instruction set.
struct ElementwiseKernels {
  void (*rms_norm_row)(const RMSNormArgs& args, const float* x, float* residual, float* out);
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half_dim,
                 bool is_interleaved);
  void (*act_mul)(const float* gate, const float* up, Activation activation, float* out,
                  int64_t count);
  void (*softcap)(float* x, int64_t count, float cap);
};

const ElementwiseKernels& elementwise_kernels_portable();
#if defined(__x86_64__)
const ElementwiseKernels& elementwise_kernels_avx2();
#endif

}  // namespace llmserve
