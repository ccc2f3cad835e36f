// Python bindings of attention and the KV cache. llmserve/kernels/attention.py checks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "llmserve/attention.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_attention(py::module_& m) {
  using namespace llmserve;
  m.def(
      "paged_attention",
      [](uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, uintptr_t k_cache,
         int64_t k_block_stride, uintptr_t v_cache, int64_t v_block_stride, int cache_type,
         int64_t num_blocks, int64_t block_size, uintptr_t block_tables, int64_t table_stride,
         int64_t max_blocks, uintptr_t seq_lens, uintptr_t cu_seqlens_q, uintptr_t out,
         int64_t num_tokens, int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads,
         int64_t head_dim, float scale, int64_t sliding_window, float logit_softcap) {
        paged_attention({pointer<const float>(q), q_token_stride, q_head_stride,
                         {pointer<void>(k_cache), k_block_stride},
                         {pointer<void>(v_cache), v_block_stride},
                         static_cast<CacheType>(cache_type), num_blocks, block_size,
                         pointer<const int32_t>(block_tables), table_stride, max_blocks,
                         pointer<const int32_t>(seq_lens), pointer<const int32_t>(cu_seqlens_q),
                         pointer<float>(out), num_tokens, num_seqs, num_heads, num_kv_heads,
                         head_dim, scale, sliding_window, logit_softcap});
      },
      py::arg("q"), py::arg("q_token_stride"), py::arg("q_head_stride"), py::arg("k_cache"),
      py::arg("k_block_stride"), py::arg("v_cache"), py::arg("v_block_stride"),
      py::arg("cache_type"), py::arg("num_blocks"), py::arg("block_size"),
      py::arg("block_tables"), py::arg("table_stride"), py::arg("max_blocks"),
      py::arg("seq_lens"), py::arg("cu_seqlens_q"), py::arg("out"), py::arg("num_tokens"),
      py::arg("num_seqs"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
      py::arg("scale"), py::arg("sliding_window"), py::arg("logit_softcap"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "write_kv",
      [](uintptr_t k, uintptr_t v, int64_t k_token_stride, int64_t k_head_stride,
         int64_t v_token_stride, int64_t v_head_stride, uintptr_t k_cache, int64_t k_block_stride,
         uintptr_t v_cache, int64_t v_block_stride, int cache_type, int64_t num_blocks,
         int64_t block_size, uintptr_t slot_mapping, bool is_slot_int64, int64_t num_tokens,
         int64_t num_kv_heads, int64_t head_dim) {
        write_kv({pointer<const float>(k), pointer<const float>(v), k_token_stride, k_head_stride,
                  v_token_stride, v_head_stride, {pointer<void>(k_cache), k_block_stride},
                  {pointer<void>(v_cache), v_block_stride}, static_cast<CacheType>(cache_type),
                  num_blocks, block_size, pointer<const void>(slot_mapping), is_slot_int64,
                  num_tokens, num_kv_heads, head_dim});
      },
      py::arg("k"), py::arg("v"), py::arg("k_token_stride"), py::arg("k_head_stride"),
      py::arg("v_token_stride"), py::arg("v_head_stride"), py::arg("k_cache"),
      py::arg("k_block_stride"), py::arg("v_cache"), py::arg("v_block_stride"),
      py::arg("cache_type"), py::arg("num_blocks"), py::arg("block_size"),
      py::arg("slot_mapping"), py::arg("is_slot_int64"), py::arg("num_tokens"),
      py::arg("num_kv_heads"), py::arg("head_dim"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "copy_blocks",
      [](uintptr_t cache, int64_t block_stride_bytes, int64_t block_bytes, int64_t num_blocks,
         const std::vector<std::pair<int64_t, int64_t>>& block_copies) {
        copy_blocks(pointer<void>(cache), block_stride_bytes, block_bytes, num_blocks,
                    block_copies);
      },
      py::arg("cache"), py::arg("block_stride_bytes"), py::arg("block_bytes"),
      py::arg("num_blocks"), py::arg("block_copies"), py::call_guard<py::gil_scoped_release>());
}
