// The module llmserve._cpu_kernels. Each group of kernels binds its functions in its own file.
#include <pybind11/pybind11.h>

void bind_attention(pybind11::module_& m);
void bind_decoder(pybind11::module_& m);
void bind_elementwise(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);
void bind_step(pybind11::module_& m);

PYBIND11_MODULE(_cpu_kernels, m) {
  m.doc() = "CPU kernels, mostly over raw pointers; llmserve.kernels checks what it passes.";
  bind_runtime(m);
  bind_attention(m);
  bind_elementwise(m);
  bind_linear(m);
  bind_decoder(m);
  bind_sampling(m);
  bind_step(m);
}
