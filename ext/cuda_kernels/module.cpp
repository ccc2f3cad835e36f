// The module llmserve._cuda_kernels. Each group of kernels binds its functions in its own file.
#include <pybind11/pybind11.h>

// Weak: a group that has not been built in is left out.
#define LLMSERVE_GROUP __attribute__((weak))

LLMSERVE_GROUP void bind_attention(pybind11::module_& m);
LLMSERVE_GROUP void bind_elementwise(pybind11::module_& m);
LLMSERVE_GROUP void bind_quantized(pybind11::module_& m);
LLMSERVE_GROUP void bind_sampling(pybind11::module_& m);

PYBIND11_MODULE(_cuda_kernels, m) {
  m.doc() = "CUDA kernels over raw pointers; llmserve.kernels.cuda checks what it passes.";
  if (bind_attention) bind_attention(m);
  if (bind_elementwise) bind_elementwise(m);
  if (bind_quantized) bind_quantized(m);
  if (bind_sampling) bind_sampling(m);
}
