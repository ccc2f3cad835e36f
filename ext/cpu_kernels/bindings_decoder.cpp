// Python bindings of whole decoder layers. llmserve/kernels/decoder_layers.py checks.
#include <pybind11/pybind11.h>

#include <vector>

#include "llmserve/decoder_layer.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Layers = std::vector<llmserve::DecoderLayer>;

}  // namespace

void bind_decoder(py::module_& m) {
  using namespace llmserve;
  py::class_<Layers>(m, "DecoderLayers")
      .def(py::init<>())
      .def(
          "add",
          [](Layers& layers, uintptr_t qkv, int64_t num_qkv, uintptr_t output, uintptr_t gate_up,
             int64_t num_gate_up, uintptr_t down, uintptr_t q_norm, uintptr_t k_norm,
             bool is_qk_norm_per_head, uintptr_t cos, uintptr_t sin, int64_t max_positions,
             int64_t half_dim, bool is_interleaved, uintptr_t post_attention_norm,
             uintptr_t pre_mlp_norm, uintptr_t post_mlp_norm, uintptr_t next_norm, float norm_eps,
             float norm_weight_offset, float residual_scale, int activation, int64_t hidden_size,
             int64_t intermediate_size, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
             float attention_scale, int64_t sliding_window, float logit_softcap) {
            layers.push_back({{pointer<const LinearPart>(qkv), num_qkv},
                              {pointer<const LinearPart>(output), 1},
                              {pointer<const LinearPart>(gate_up), num_gate_up},
                              {pointer<const LinearPart>(down), 1},
                              pointer<const float>(q_norm),
                              pointer<const float>(k_norm),
                              is_qk_norm_per_head,
                              pointer<const float>(cos),
                              pointer<const float>(sin),
                              max_positions,
                              half_dim,
                              is_interleaved,
                              pointer<const float>(post_attention_norm),
                              pointer<const float>(pre_mlp_norm),
                              pointer<const float>(post_mlp_norm),
                              pointer<const float>(next_norm),
                              norm_eps,
                              norm_weight_offset,
                              residual_scale,
                              static_cast<Activation>(activation),
                              hidden_size,
                              intermediate_size,
                              num_heads,
                              num_kv_heads,
                              head_dim,
                              attention_scale,
                              sliding_window,
                              logit_softcap});
          },
          py::kw_only(), py::arg("qkv"), py::arg("num_qkv"), py::arg("output"), py::arg("gate_up"),
          py::arg("num_gate_up"), py::arg("down"), py::arg("q_norm"), py::arg("k_norm"),
          py::arg("is_qk_norm_per_head"), py::arg("cos"), py::arg("sin"), py::arg("max_positions"),
          py::arg("half_dim"), py::arg("is_interleaved"), py::arg("post_attention_norm"),
          py::arg("pre_mlp_norm"), py::arg("post_mlp_norm"), py::arg("next_norm"),
          py::arg("norm_eps"), py::arg("norm_weight_offset"), py::arg("residual_scale"),
          py::arg("activation"), py::arg("hidden_size"), py::arg("intermediate_size"),
          py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
          py::arg("attention_scale"), py::arg("sliding_window"), py::arg("logit_softcap"))
      .def(
          "run",
          [](const Layers& layers, uintptr_t groups, uintptr_t caches, int cache_type,
             int64_t num_blocks, int64_t block_size, int64_t num_tokens, int64_t num_seqs,
             uintptr_t qkv, uintptr_t intermediate, uintptr_t attention_out, uintptr_t gate_up,
             uintptr_t mlp_out, uintptr_t x, uintptr_t residual) {
            const float* last = run_decoder_layers(
                layers,
                {pointer<const StepInputs>(groups), pointer<const LayerCacheView>(caches),
                 static_cast<CacheType>(cache_type), num_blocks, block_size, num_tokens, num_seqs},
                {pointer<float>(qkv), pointer<float>(intermediate), pointer<float>(attention_out),
                 pointer<float>(gate_up), pointer<float>(mlp_out)},
                pointer<const float>(x), pointer<float>(residual));
            return last == pointer<const float>(residual);
          },
          py::arg("groups"), py::arg("caches"), py::arg("cache_type"), py::arg("num_blocks"),
          py::arg("block_size"), py::arg("num_tokens"), py::arg("num_seqs"), py::arg("qkv"),
          py::arg("intermediate"), py::arg("attention_out"), py::arg("gate_up"),
          py::arg("mlp_out"), py::arg("x"), py::arg("residual"),
          py::call_guard<py::gil_scoped_release>());
}
