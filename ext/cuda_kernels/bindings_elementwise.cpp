// Python bindings of the row and element kernels. llmserve/kernels/cuda/elementwise.py checks.
// Pointers and streams come as addresses, 0 for absent ones; types by their number in DType.
#include <pybind11/pybind11.h>

#include "llmserve/cuda/elementwise.h"

namespace py = pybind11;
namespace cuda = llmserve::cuda;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

cuda::Rows rows(uintptr_t data, int type, int64_t token_stride, int64_t head_stride = 0) {
  return {pointer<void>(data), static_cast<cuda::DType>(type), token_stride, head_stride};
}

cuda::Norm norm(uintptr_t weight, float eps, float offset) {
  return {pointer<const float>(weight), eps, offset};
}

cuda::KVCache cache(uintptr_t data, int64_t block_stride, uintptr_t scales) {
  return {pointer<void>(data), block_stride, pointer<const float>(scales)};
}

}  // namespace

void bind_elementwise(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using py::arg;
  m.def(
      "add_norm",
      [](uintptr_t x, int x_type, int64_t x_token_stride, int64_t x_head_stride, uintptr_t residual,
         int64_t residual_token_stride, int64_t residual_head_stride, uintptr_t out, int out_type,
         int64_t out_token_stride, int64_t out_head_stride, uintptr_t post_weight, float post_eps,
         float post_offset, uintptr_t weight, float eps, float offset, float scale,
         int64_t num_tokens, int64_t num_heads, int64_t size, uintptr_t stream) {
        cuda::add_norm(
            {rows(x, x_type, x_token_stride, x_head_stride),
             rows(residual, 0, residual_token_stride, residual_head_stride),
             rows(out, out_type, out_token_stride, out_head_stride),
             norm(post_weight, post_eps, post_offset), norm(weight, eps, offset), scale, num_tokens,
             num_heads, size},
            pointer<void>(stream));
      },
      arg("x"), arg("x_type"), arg("x_token_stride"), arg("x_head_stride"), arg("residual"),
      arg("residual_token_stride"), arg("residual_head_stride"), arg("out"), arg("out_type"),
      arg("out_token_stride"), arg("out_head_stride"), arg("post_weight"), arg("post_eps"),
      arg("post_offset"), arg("weight"), arg("eps"), arg("offset"), arg("scale"),
      arg("num_tokens"), arg("num_heads"), arg("size"), arg("stream"), NoGil());
  m.def(
      "rotate_and_write",
      [](int type, uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, uintptr_t q_out,
         int64_t q_out_token_stride, int64_t q_out_head_stride, uintptr_t k, int64_t k_token_stride,
         int64_t k_head_stride, uintptr_t v, int64_t v_token_stride, int64_t v_head_stride,
         uintptr_t k_out, int64_t k_out_token_stride, int64_t k_out_head_stride, uintptr_t q_norm,
         uintptr_t k_norm, float eps, float offset, uintptr_t positions, uintptr_t cos,
         uintptr_t sin, int64_t max_positions, int64_t half_dim, bool is_interleaved,
         uintptr_t k_cache, int64_t k_block_stride, uintptr_t k_scales, uintptr_t v_cache,
         int64_t v_block_stride, uintptr_t v_scales, int cache_type, uintptr_t slots,
         int64_t num_blocks, int64_t block_size, int64_t num_tokens, int64_t num_heads,
         int64_t num_kv_heads, int64_t head_dim, uintptr_t stream) {
        cuda::RotateAndWriteArgs args{};
        args.q = rows(q, type, q_token_stride, q_head_stride);
        args.q_out = rows(q_out, type, q_out_token_stride, q_out_head_stride);
        args.k = rows(k, type, k_token_stride, k_head_stride);
        args.v = rows(v, type, v_token_stride, v_head_stride);
        args.k_out = rows(k_out, type, k_out_token_stride, k_out_head_stride);
        args.q_norm = norm(q_norm, eps, offset);
        args.k_norm = norm(k_norm, eps, offset);
        args.positions = pointer<const int64_t>(positions);
        args.cos = pointer<const float>(cos);
        args.sin = pointer<const float>(sin);
        args.max_positions = max_positions;
        args.half_dim = half_dim;
        args.is_interleaved = is_interleaved;
        args.k_cache = cache(k_cache, k_block_stride, k_scales);
        args.v_cache = cache(v_cache, v_block_stride, v_scales);
        args.cache_type = static_cast<cuda::DType>(cache_type);
        args.slots = pointer<const int64_t>(slots);
        args.num_blocks = num_blocks;
        args.block_size = block_size;
        args.num_tokens = num_tokens;
        args.num_heads = num_heads;
        args.num_kv_heads = num_kv_heads;
        args.head_dim = head_dim;
        cuda::rotate_and_write(args, pointer<void>(stream));
      },
      arg("type"), arg("q"), arg("q_token_stride"), arg("q_head_stride"), arg("q_out"),
      arg("q_out_token_stride"), arg("q_out_head_stride"), arg("k"), arg("k_token_stride"),
      arg("k_head_stride"), arg("v"), arg("v_token_stride"), arg("v_head_stride"), arg("k_out"),
      arg("k_out_token_stride"), arg("k_out_head_stride"), arg("q_norm"), arg("k_norm"), arg("eps"),
      arg("offset"), arg("positions"), arg("cos"), arg("sin"), arg("max_positions"),
      arg("half_dim"), arg("is_interleaved"), arg("k_cache"), arg("k_block_stride"),
      arg("k_scales"), arg("v_cache"), arg("v_block_stride"), arg("v_scales"), arg("cache_type"),
      arg("slots"), arg("num_blocks"), arg("block_size"), arg("num_tokens"), arg("num_heads"),
      arg("num_kv_heads"), arg("head_dim"), arg("stream"), NoGil());
  m.attr("max_head_dim") = cuda::kMaxHeadDim;
  m.attr("max_norm_size") = cuda::kMaxNormSize;
  m.def(
      "act_mul",
      [](uintptr_t gate_up, int type, int64_t token_stride, int activation, uintptr_t out,
         int64_t out_token_stride, int64_t num_tokens, int64_t size, uintptr_t stream) {
        cuda::act_mul(rows(gate_up, type, token_stride), static_cast<cuda::Activation>(activation),
                      rows(out, type, out_token_stride), num_tokens, size, pointer<void>(stream));
      },
      arg("gate_up"), arg("type"), arg("token_stride"), arg("activation"), arg("out"),
      arg("out_token_stride"), arg("num_tokens"), arg("size"), arg("stream"), NoGil());
  m.def(
      "embedding",
      [](uintptr_t ids, uintptr_t table, int type, int64_t row_stride, int64_t num_rows,
         float scale, uintptr_t out, int64_t num_tokens, int64_t size, uintptr_t stream) {
        cuda::embedding(pointer<const int64_t>(ids), rows(table, type, row_stride), num_rows, scale,
                        pointer<float>(out), num_tokens, size, pointer<void>(stream));
      },
      arg("ids"), arg("table"), arg("type"), arg("row_stride"), arg("num_rows"), arg("scale"),
      arg("out"), arg("num_tokens"), arg("size"), arg("stream"), NoGil());
  m.def(
      "softcap",
      [](uintptr_t x, int64_t count, float cap, uintptr_t stream) {
        cuda::softcap(pointer<float>(x), count, cap, pointer<void>(stream));
      },
      arg("x"), arg("count"), arg("cap"), arg("stream"), NoGil());
  m.def(
      "add_bias",
      [](uintptr_t x, int type, int64_t token_stride, uintptr_t bias, int64_t num_tokens,
         int64_t size, uintptr_t stream) {
        cuda::add_bias(rows(x, type, token_stride), pointer<const float>(bias), num_tokens, size,
                       pointer<void>(stream));
      },
      arg("x"), arg("type"), arg("token_stride"), arg("bias"), arg("num_tokens"), arg("size"),
      arg("stream"), NoGil());
  m.def(
      "gather_rows",
      [](uintptr_t x, int64_t row_stride_bytes, int64_t row_bytes, uintptr_t row_ids,
         int64_t num_rows, uintptr_t out, uintptr_t stream) {
        cuda::gather_rows(pointer<const void>(x), row_stride_bytes, row_bytes,
                          pointer<const int64_t>(row_ids), num_rows, pointer<void>(out),
                          pointer<void>(stream));
      },
      arg("x"), arg("row_stride_bytes"), arg("row_bytes"), arg("row_ids"), arg("num_rows"),
      arg("out"), arg("stream"), NoGil());
  m.def(
      "copy_blocks",
      [](uintptr_t caches, int64_t num_caches, int64_t block_stride_bytes, int64_t block_bytes,
         uintptr_t pairs, int64_t num_pairs, bool is_vectorized, uintptr_t stream) {
        cuda::copy_blocks(pointer<const uint64_t>(caches), num_caches, block_stride_bytes,
                          block_bytes, pointer<const int64_t>(pairs), num_pairs, is_vectorized,
                          pointer<void>(stream));
      },
      arg("caches"), arg("num_caches"), arg("block_stride_bytes"), arg("block_bytes"),
      arg("pairs"), arg("num_pairs"), arg("is_vectorized"), arg("stream"), NoGil());
  m.def(
      "feed_tokens",
      [](uintptr_t input_ids, uintptr_t source_rows, uintptr_t last_tokens, int64_t num_tokens,
         uintptr_t stream) {
        cuda::feed_tokens(pointer<int64_t>(input_ids), pointer<const int32_t>(source_rows),
                          pointer<const int32_t>(last_tokens), num_tokens, pointer<void>(stream));
      },
      arg("input_ids"), arg("source_rows"), arg("last_tokens"), arg("num_tokens"), arg("stream"),
      NoGil());
}
