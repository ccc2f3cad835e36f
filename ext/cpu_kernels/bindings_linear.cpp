#include <pybind11/pybind11.h>

#include "llmserve/linear.h"

namespace py = pybind11;

namespace {

using llmserve::Matrix;

Matrix matrix(uintptr_t data, int type, int64_t num_rows, int64_t num_cols) {
  return {reinterpret_cast<const uint8_t*>(data), type, num_rows, num_cols};
}

void linear(uintptr_t x, uintptr_t parts, int64_t num_parts, uintptr_t out, int64_t num_tokens) {
  llmserve::linear(reinterpret_cast<const float*>(x),
                   reinterpret_cast<const llmserve::LinearPart*>(parts), num_parts,
                   reinterpret_cast<float*>(out), num_tokens);
}

void embedding(uintptr_t token_ids, uintptr_t weight, int type, float scale, uintptr_t out,
               int64_t num_tokens, int64_t num_rows, int64_t num_cols) {
  llmserve::embedding(reinterpret_cast<const int64_t*>(token_ids),
                      matrix(weight, type, num_rows, num_cols), scale,
                      reinterpret_cast<float*>(out), num_tokens);
}

void dequantize(uintptr_t weight, int type, uintptr_t out, int64_t num_rows, int64_t num_cols) {
  llmserve::dequantize(matrix(weight, type, num_rows, num_cols), reinterpret_cast<float*>(out));
}

void pack(uintptr_t weight, int type, uintptr_t out, int64_t num_rows, int64_t num_cols) {
  llmserve::pack(matrix(weight, type, num_rows, num_cols), reinterpret_cast<uint8_t*>(out));
}

}  // namespace

void bind_linear(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("linear", &linear, py::arg("x"), py::arg("parts"), py::arg("num_parts"), py::arg("out"),
        py::arg("num_tokens"), NoGil());
  m.def("embedding", &embedding, py::arg("token_ids"), py::arg("weight"), py::arg("type"),
        py::arg("scale"), py::arg("out"), py::arg("num_tokens"), py::arg("num_rows"),
        py::arg("num_cols"), NoGil());
  m.def("dequantize", &dequantize, py::arg("weight"), py::arg("type"), py::arg("out"),
        py::arg("num_rows"), py::arg("num_cols"), NoGil());
  m.def("packed_bytes", &llmserve::packed_bytes, py::arg("type"), py::arg("num_rows"),
        py::arg("num_cols"));
  m.def("pack", &pack, py::arg("weight"), py::arg("type"), py::arg("out"), py::arg("num_rows"),
        py::arg("num_cols"), NoGil());
}
