// The module _cuda_emulator, in the same library as the kernels: what tests tell the emulator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "memory.h"

namespace py = pybind11;

namespace emulated = llmserve::cuda::emulated;

using BufferTuple = std::tuple<uintptr_t, size_t, uintptr_t, std::string>;

PYBIND11_MODULE(_cuda_emulator, m) {
  m.def(
      "set_buffers",
      [](const std::vector<BufferTuple>& tuples) {
        std::vector<emulated::Buffer> buffers;
        for (const auto& [begin, bytes, mask, name] : tuples) {
          buffers.push_back(
              {begin, begin + bytes, reinterpret_cast<const uint8_t*>(mask), name, nullptr});
        }
        emulated::set_buffers(std::move(buffers));
      },
      py::arg("buffers"));
  m.def("take_host_finding", &emulated::take_host_finding);
}
