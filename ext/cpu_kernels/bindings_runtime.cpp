#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "llmserve/instruction_set.h"
#include "llmserve/parallel.h"

namespace py = pybind11;

void bind_runtime(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("get_num_threads", &llmserve::get_num_threads, NoGil());
  m.def("set_num_threads", &llmserve::set_num_threads, py::arg("num_threads"), NoGil());
  m.def("available_instruction_sets", &llmserve::available_instruction_sets);
  m.def("set_instruction_set", &llmserve::set_instruction_set, py::arg("name"));
}
