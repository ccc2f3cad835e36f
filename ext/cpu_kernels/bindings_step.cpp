// Python bindings of what gathers a step's input. llmserve/kernels/step_gather.py checks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "llmserve/step_gather.h"

namespace py = pybind11;

namespace {

using Numbers = std::vector<int64_t>;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Holds the addresses, so that a step passes its sequences alone.
struct StepGather {
  py::object arrays;  // what the addresses belong to
  llmserve::SequenceRows rows;
  llmserve::GatheredStep step;
  int64_t num_seqs;

  void run(const Numbers& row_ids, const Numbers& num_computed,
           const Numbers& num_scheduled) const {
    const auto size = static_cast<size_t>(num_seqs);
    if (row_ids.size() != size || num_computed.size() != size || num_scheduled.size() != size) {
      throw std::invalid_argument("a step of another number of sequences");
    }
    std::vector<llmserve::ScheduledRow> scheduled(size);
    for (size_t i = 0; i < size; ++i) {
      scheduled[i] = {row_ids[i], num_computed[i], num_scheduled[i]};
    }
    llmserve::gather_step(rows, scheduled.data(), num_seqs, step);
  }
};

}  // namespace

void bind_step(py::module_& m) {
  py::class_<StepGather>(m, "StepGather")
      .def(py::init([](py::object arrays, uintptr_t row_token_ids, uintptr_t row_tables,
                       int64_t num_rows, int64_t max_tokens, int64_t num_groups,
                       int64_t max_blocks, int64_t block_size, uintptr_t token_ids,
                       uintptr_t positions, uintptr_t slot_mapping, uintptr_t tables,
                       int64_t table_width, uintptr_t seq_lens, uintptr_t cu_seqlens_q,
                       int64_t num_tokens, int64_t num_seqs) {
             return StepGather{
                 std::move(arrays),
                 {pointer<const int32_t>(row_token_ids), pointer<const int32_t>(row_tables),
                  num_rows, max_tokens, num_groups, max_blocks, block_size},
                 {pointer<int64_t>(token_ids), pointer<int64_t>(positions),
                  pointer<int64_t>(slot_mapping), pointer<int32_t>(tables), table_width,
                  pointer<int32_t>(seq_lens), pointer<int32_t>(cu_seqlens_q), num_tokens},
                 num_seqs};
           }),
           py::kw_only(), py::arg("arrays"), py::arg("row_token_ids"), py::arg("row_tables"),
           py::arg("num_rows"), py::arg("max_tokens"), py::arg("num_groups"), py::arg("max_blocks"),
           py::arg("block_size"), py::arg("token_ids"), py::arg("positions"),
           py::arg("slot_mapping"), py::arg("tables"), py::arg("table_width"),
           py::arg("seq_lens"), py::arg("cu_seqlens_q"), py::arg("num_tokens"),
           py::arg("num_seqs"))
      .def("run", &StepGather::run, py::arg("row_ids"), py::arg("num_computed"),
           py::arg("num_scheduled"));
}
