// The module _mutants: each mutant by its name, and the number conversions of device.h.
#include <pybind11/pybind11.h>

#include "llmserve/cuda/device.h"
#include "mutants.h"

namespace py = pybind11;

using namespace llmserve::cuda;
namespace mutants = llmserve::mutants;

namespace {

template <mutants::Mutant& kMutant>
void run(bool broken, uintptr_t out, uintptr_t x, int n) {
  kMutant(broken, reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x), n);
}

// bits[i] = from_float<T>(values[i]).bits
template <typename T, typename Bits>
void encode(uintptr_t values, uintptr_t bits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    reinterpret_cast<Bits*>(bits)[i] =
        from_float<T>(reinterpret_cast<const float*>(values)[i]).bits;
  }
}

template <typename T, typename Bits>
void decode(uintptr_t bits, uintptr_t values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    reinterpret_cast<float*>(values)[i] = to_float(T{reinterpret_cast<const Bits*>(bits)[i]});
  }
}

}  // namespace

#define LLMSERVE_MUTANT(name) m.def(#name, &run<mutants::name>)

PYBIND11_MODULE(_mutants, m) {
  LLMSERVE_MUTANT(read_past_end);
  LLMSERVE_MUTANT(write_past_end);
  LLMSERVE_MUTANT(write_before_start);
  LLMSERVE_MUTANT(misaligned_load);
  LLMSERVE_MUTANT(misaligned_element);
  LLMSERVE_MUTANT(write_between_rows);
  LLMSERVE_MUTANT(unwritten_tail);
  LLMSERVE_MUTANT(shared_index);
  LLMSERVE_MUTANT(too_much_dynamic_shared);
  LLMSERVE_MUTANT(host_access);
  LLMSERVE_MUTANT(other_thread_stack);
  LLMSERVE_MUTANT(missing_barrier);
  LLMSERVE_MUTANT(barrier_in_branch);
  LLMSERVE_MUTANT(exit_before_barrier);
  LLMSERVE_MUTANT(two_barriers);
  LLMSERVE_MUTANT(shuffle_in_branch);
  LLMSERVE_MUTANT(exit_before_shuffle);
  LLMSERVE_MUTANT(missing_lane);
  LLMSERVE_MUTANT(missing_warp_sync);
  LLMSERVE_MUTANT(unwritten_shared);
  LLMSERVE_MUTANT(one_barrier_per_round);
  LLMSERVE_MUTANT(plain_counter);
  LLMSERVE_MUTANT(plain_shared_counter);
  LLMSERVE_MUTANT(same_element);
  LLMSERVE_MUTANT(neighbour_in_place);
  LLMSERVE_MUTANT(last_block_sum);
  LLMSERVE_MUTANT(spin_for_block);
  LLMSERVE_MUTANT(copy_without_wait);
  LLMSERVE_MUTANT(copy_without_commit);
  LLMSERVE_MUTANT(copy_wait_for_older);
  LLMSERVE_MUTANT(copy_without_barrier);
  LLMSERVE_MUTANT(copy_over_readers);
  LLMSERVE_MUTANT(copy_misaligned);
  LLMSERVE_MUTANT(matrix_without_sync);
  LLMSERVE_MUTANT(swapped_fragments);
  m.def("encode_half", &encode<half, uint16_t>);
  m.def("encode_bfloat16", &encode<bfloat16, uint16_t>);
  m.def("encode_fp8", &encode<fp8, uint8_t>);
  m.def("decode_half", &decode<half, uint16_t>);
  m.def("decode_bfloat16", &decode<bfloat16, uint16_t>);
  m.def("decode_fp8", &decode<fp8, uint8_t>);
}
