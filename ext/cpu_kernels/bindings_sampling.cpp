// Python bindings of the sampling kernels. The wrappers in llmserve/kernels/sampling.py check.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "llmserve/sampling.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def(
      "sample_rows",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
         const py::array& params, uintptr_t masks, py::array& out) {
        // Arrays, as asking numpy for an address takes longer than sampling a greedy row.
        const auto* rows = static_cast<const llmserve::SamplingRow*>(params.data());
        auto* sampled = static_cast<llmserve::SampledRow*>(out.mutable_data());
        py::gil_scoped_release no_gil;
        llmserve::sample_rows(pointer<float>(logits), row_stride, num_rows, vocab_size, rows,
                              pointer<const llmserve::TokenMask>(masks), sampled);
      },
      py::arg("logits"), py::arg("row_stride"), py::arg("num_rows"), py::arg("vocab_size"),
      py::arg("params"), py::arg("masks"), py::arg("out"));
  m.def(
      "logprob_rows",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
         uintptr_t row_ids, uintptr_t token_ids, int64_t top_k, uintptr_t logprobs,
         uintptr_t ranks, uintptr_t top_ids, uintptr_t top_logprobs) {
        llmserve::logprob_rows(pointer<const float>(logits), row_stride, num_rows, vocab_size,
                     pointer<const int32_t>(row_ids), pointer<const int32_t>(token_ids), top_k,
                     pointer<double>(logprobs), pointer<int32_t>(ranks), pointer<int32_t>(top_ids),
                     pointer<double>(top_logprobs));
      },
      py::arg("logits"), py::arg("row_stride"), py::arg("num_rows"), py::arg("vocab_size"),
      py::arg("row_ids"), py::arg("token_ids"), py::arg("top_k"), py::arg("logprobs"),
      py::arg("ranks"), py::arg("top_ids"), py::arg("top_logprobs"),
      py::call_guard<py::gil_scoped_release>());
  m.def("philox4x32", &llmserve::philox4x32, py::arg("counter"), py::arg("key"));
}
