// The module llmserve._cuda_kernels. Each group of kernels binds its functions in its own file.
#include <pybind11/pybind11.h>

void bind_attention(pybind11::module_& m);
void bind_elementwise(pybind11::module_& m);
void bind_quantized(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);

PYBIND11_MODULE(_cuda_kernels, m) {
  m.doc() = "CUDA kernels over raw pointers; llmserve.kernels.cuda checks what it passes.";
  bind_attention(m);
  bind_elementwise(m);
  bind_quantized(m);
  bind_sampling(m);
}
