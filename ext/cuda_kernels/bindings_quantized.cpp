#include <pybind11/pybind11.h>

#include "llmserve/cuda/linear.h"

namespace py = pybind11;

namespace {

using llmserve::cuda::Format;
using llmserve::cuda::LinearPart;
using llmserve::cuda::Stream;

void linear(uintptr_t parts, int64_t num_parts, uintptr_t x, int64_t x_type, uintptr_t out,
            int64_t out_type, int64_t num_tokens, int64_t num_cols, uintptr_t stream) {
  llmserve::cuda::linear(reinterpret_cast<const LinearPart*>(parts), num_parts,
                         reinterpret_cast<const void*>(x), static_cast<Format>(x_type),
                         reinterpret_cast<void*>(out), static_cast<Format>(out_type), num_tokens,
                         num_cols, reinterpret_cast<Stream>(stream));
}

void dequantize(uintptr_t part, uintptr_t row_ids, int64_t first_row, uintptr_t out,
                int64_t out_type, int64_t num_rows, int64_t num_cols, uintptr_t stream) {
  llmserve::cuda::dequantize(*reinterpret_cast<const LinearPart*>(part),
                             reinterpret_cast<const int64_t*>(row_ids), first_row,
                             reinterpret_cast<void*>(out), static_cast<Format>(out_type), num_rows,
                             num_cols, reinterpret_cast<Stream>(stream));
}

}  // namespace

void bind_quantized(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("linear", &linear, py::arg("parts"), py::arg("num_parts"), py::arg("x"), py::arg("x_type"),
        py::arg("out"), py::arg("out_type"), py::arg("num_tokens"), py::arg("num_cols"),
        py::arg("stream"), NoGil());
  m.def("dequantize", &dequantize, py::arg("part"), py::arg("row_ids"), py::arg("first_row"),
        py::arg("out"), py::arg("out_type"), py::arg("num_rows"), py::arg("num_cols"),
        py::arg("stream"), NoGil());
}
