// Launchers of the operations on single rows or elements. Nothing is checked here; the wrappers in
// llmserve/kernels/cuda/elementwise.py do. Strides are in elements unless a name says bytes.
//
// Rows are read and written 16 bytes at a time where every row of a call begins at a multiple of 16
// bytes and has a multiple of eight values, else value by value. A row is reduced in an order that
// depends on its length and that alignment alone, never on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmserve/cuda/stream.h"
#include "llmserve/cuda/types.h"

namespace llmserve::cuda {

// Rows [num_tokens, num_heads] of adjacent values.
struct Rows {
  void* data;  // null: absent
  DType type;
  int64_t token_stride;
  int64_t head_stride;
};

// y = x / sqrt(mean(x^2) + eps) * (offset + weight). Without weight: y = x.
struct Norm {
  const float* weight;  // [size]
  float eps;
  float offset;
};

constexpr int64_t kMaxNormSize = 32768;

struct AddNormArgs {
  Rows x;         // float32, or the type of out
  Rows residual;  // float32; absent: nothing is added, and out = norm(x)
  Rows out;       // may be x
  Norm post;      // of x, before it is added
  Norm norm;      // of the sum
  float scale;    // of what is added
  int64_t num_tokens;
  int64_t num_heads;
  int64_t size;  // at most kMaxNormSize
};

// residual += scale * post(x), in place; out = norm(residual).
void add_norm(const AddNormArgs& args, Stream stream);

// A paged cache [num_blocks, block_size, num_kv_heads, head_dim], each block contiguous.
struct KVCache {
  void* data;  // null: absent
  int64_t block_stride;
  const float* scales;  // [num_kv_heads]: a value v is stored as v / scale; null: as v
};

struct RotateAndWriteArgs {
  Rows q;      // num_heads may be 0
  Rows q_out;  // may be q
  Rows k;
  Rows v;            // or absent
  Rows k_out;        // where rotated keys go besides the cache, or absent; may be k
  Norm q_norm;       // of each head, before the rotation
  Norm k_norm;
  const int64_t* positions;  // [num_tokens]
  const float* cos;          // [max_positions, half_dim]; null: nothing is rotated
  const float* sin;
  int64_t max_positions;  // positions beyond are taken for the last one
  int64_t half_dim;       // the first 2 * half_dim values of a head are rotated
  bool is_interleaved;    // pairs (0, 1), (2, 3), ... rather than (0, half_dim), ...
  KVCache k_cache;
  KVCache v_cache;
  DType cache_type;
  const int64_t* slots;  // [num_tokens]; what is outside the cache, as -1, is not written
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;  // at most kMaxHeadDim
};

constexpr int64_t kMaxHeadDim = 256;

// Norm and rotation of each head of q and k, and the step's K and V into their slots: the work
// between the projections and the attention of a layer. q, k, v, q_out and k_out have one type.
void rotate_and_write(const RotateAndWriteArgs& args, Stream stream);

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// out[token][i] = activation(gate_up[token][i]) * gate_up[token][size + i]; one type.
void act_mul(Rows gate_up, Activation activation, Rows out, int64_t num_tokens, int64_t size,
             Stream stream);

// out[token] = scale * table[ids[token]], float32 [num_tokens, size]; zeros for ids outside the
// table, which only padding may have. table: float32, float16 or bfloat16 [num_rows, size].
void embedding(const int64_t* ids, Rows table, int64_t num_rows, float scale, float* out,
               int64_t num_tokens, int64_t size, Stream stream);

// x = cap * tanh(x / cap)
void softcap(float* x, int64_t count, float cap, Stream stream);

// x[token][i] += bias[i]
void add_bias(Rows x, const float* bias, int64_t num_tokens, int64_t size, Stream stream);

// out[i] = x[row_ids[i]], rows of row_bytes bytes; zeros for a negative id. out: contiguous.
void gather_rows(const void* x, int64_t row_stride_bytes, int64_t row_bytes,
                 const int64_t* row_ids, int64_t num_rows, void* out, Stream stream);

// In each of caches[0 .. num_caches): block pairs[i][1] = block pairs[i][0]. All copies at once: no
// block may be written that another pair reads or writes. caches: addresses in device memory;
// is_vectorized: they, block_stride_bytes and block_bytes are multiples of 16.
void copy_blocks(const uint64_t* caches, int64_t num_caches, int64_t block_stride_bytes,
                 int64_t block_bytes, const int64_t* pairs, int64_t num_pairs, bool is_vectorized,
                 Stream stream);

// input_ids[i] = last_tokens[source_rows[i]] where source_rows[i] >= 0.
void feed_tokens(int64_t* input_ids, const int32_t* source_rows, const int32_t* last_tokens,
                 int64_t num_tokens, Stream stream);

}  // namespace llmserve::cuda
