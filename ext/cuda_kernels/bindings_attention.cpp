// Python bindings of paged attention on CUDA. llmserve/kernels/cuda/attention.py checks.
#include <pybind11/pybind11.h>

#include "llmserve/cuda/attention.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_attention(py::module_& m) {
  using namespace llmserve::cuda;
  m.def(
      "attention_workspace_bytes",
      [](int32_t num_seqs, int32_t num_heads, int32_t head_dim, int32_t max_seq_len,
         int32_t sliding_window) {
        AttentionArgs args = {};
        args.num_seqs = num_seqs;
        args.num_heads = num_heads;
        args.head_dim = head_dim;
        args.max_seq_len = max_seq_len;
        args.sliding_window = sliding_window;
        return attention_workspace_bytes(args);
      },
      py::arg("num_seqs"), py::arg("num_heads"), py::arg("head_dim"), py::arg("max_seq_len"),
      py::arg("sliding_window"));
  m.def(
      "paged_attention",
      [](uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, uintptr_t k_cache,
         uintptr_t v_cache, int64_t k_block_stride, int64_t v_block_stride, uintptr_t k_scale,
         uintptr_t v_scale, uintptr_t sinks, uintptr_t block_tables, int64_t table_stride,
         uintptr_t seq_lens, uintptr_t cu_seqlens_q, uintptr_t out, uintptr_t workspace,
         int32_t element_type, int32_t cache_type, int32_t num_tokens, int32_t num_seqs,
         int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
         int32_t max_query_len, int32_t max_seq_len, int32_t sliding_window, float scale,
         float logit_softcap, uintptr_t stream) {
        paged_attention({pointer<const void>(q),
                         q_token_stride,
                         q_head_stride,
                         pointer<const void>(k_cache),
                         pointer<const void>(v_cache),
                         k_block_stride,
                         v_block_stride,
                         pointer<const float>(k_scale),
                         pointer<const float>(v_scale),
                         pointer<const float>(sinks),
                         pointer<const int32_t>(block_tables),
                         table_stride,
                         pointer<const int32_t>(seq_lens),
                         pointer<const int32_t>(cu_seqlens_q),
                         pointer<void>(out),
                         pointer<float>(workspace),
                         static_cast<DType>(element_type),
                         static_cast<DType>(cache_type),
                         num_tokens,
                         num_seqs,
                         num_heads,
                         num_kv_heads,
                         head_dim,
                         block_size,
                         max_query_len,
                         max_seq_len,
                         sliding_window,
                         scale,
                         logit_softcap},
                        pointer<void>(stream));
      },
      py::arg("q"), py::arg("q_token_stride"), py::arg("q_head_stride"), py::arg("k_cache"),
      py::arg("v_cache"), py::arg("k_block_stride"), py::arg("v_block_stride"), py::arg("k_scale"),
      py::arg("v_scale"), py::arg("sinks"), py::arg("block_tables"), py::arg("table_stride"),
      py::arg("seq_lens"), py::arg("cu_seqlens_q"), py::arg("out"), py::arg("workspace"),
      py::arg("element_type"), py::arg("cache_type"), py::arg("num_tokens"), py::arg("num_seqs"),
      py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("block_size"),
      py::arg("max_query_len"), py::arg("max_seq_len"), py::arg("sliding_window"), py::arg("scale"),
      py::arg("logit_softcap"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}
