// Python bindings of the elementwise kernels. llmserve/kernels/elementwise.py checks.
#include <pybind11/pybind11.h>

#include "llmserve/elementwise.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_elementwise(py::module_& m) {
  using namespace llmserve;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "rms_norm",
      [](uintptr_t x, int64_t x_token_stride, int64_t x_head_stride, uintptr_t residual,
         int64_t residual_token_stride, int64_t residual_head_stride, uintptr_t out,
         int64_t out_token_stride, int64_t out_head_stride, uintptr_t weight, int64_t num_tokens,
         int64_t num_heads, int64_t size, float eps, float weight_offset) {
        rms_norm({{pointer<float>(x), x_token_stride, x_head_stride},
                  {pointer<float>(residual), residual_token_stride, residual_head_stride},
                  {pointer<float>(out), out_token_stride, out_head_stride},
                  pointer<const float>(weight), num_tokens, num_heads, size, eps, weight_offset});
      },
      py::arg("x"), py::arg("x_token_stride"), py::arg("x_head_stride"), py::arg("residual"),
      py::arg("residual_token_stride"), py::arg("residual_head_stride"), py::arg("out"),
      py::arg("out_token_stride"), py::arg("out_head_stride"), py::arg("weight"),
      py::arg("num_tokens"), py::arg("num_heads"), py::arg("size"), py::arg("eps"),
      py::arg("weight_offset"), NoGil());
  m.def(
      "rotary",
      [](uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, int64_t num_q_heads,
         uintptr_t k, int64_t k_token_stride, int64_t k_head_stride, int64_t num_k_heads,
         uintptr_t positions, bool is_position_int64, uintptr_t cos, uintptr_t sin,
         int64_t max_positions, int64_t half_dim, int64_t num_tokens, bool is_interleaved) {
        rotary({{pointer<float>(q), q_token_stride, q_head_stride},
                {pointer<float>(k), k_token_stride, k_head_stride},
                num_q_heads, num_k_heads, pointer<const void>(positions), is_position_int64,
                pointer<const float>(cos), pointer<const float>(sin), max_positions, half_dim,
                num_tokens, is_interleaved});
      },
      py::arg("q"), py::arg("q_token_stride"), py::arg("q_head_stride"), py::arg("num_q_heads"),
      py::arg("k"), py::arg("k_token_stride"), py::arg("k_head_stride"), py::arg("num_k_heads"),
      py::arg("positions"), py::arg("is_position_int64"), py::arg("cos"), py::arg("sin"),
      py::arg("max_positions"), py::arg("half_dim"), py::arg("num_tokens"),
      py::arg("is_interleaved"), NoGil());
  m.def(
      "act_mul",
      [](uintptr_t gate_up, int64_t token_stride, int activation, uintptr_t out,
         int64_t num_tokens, int64_t size) {
        act_mul(pointer<const float>(gate_up), token_stride, static_cast<Activation>(activation),
                pointer<float>(out), num_tokens, size);
      },
      py::arg("gate_up"), py::arg("token_stride"), py::arg("activation"), py::arg("out"),
      py::arg("num_tokens"), py::arg("size"), NoGil());
  m.def(
      "softcap",
      [](uintptr_t x, int64_t count, float cap) { softcap(pointer<float>(x), count, cap); },
      py::arg("x"), py::arg("count"), py::arg("cap"), NoGil());
}
