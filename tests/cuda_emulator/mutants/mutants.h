// Kernels that are right with broken = false, and with broken = true wrong in one way each, which the
// emulator must find. All take a result and an input; n says how many elements.
#pragma once

namespace llmserve::mutants {

using Mutant = void(bool broken, void* out, const void* x, int n);

// bounds.cu: float elements
Mutant read_past_end, write_past_end, write_before_start, misaligned_load, misaligned_element,
    write_between_rows, unwritten_tail, shared_index, too_much_dynamic_shared, host_access,
    other_thread_stack;
// barriers.cu: float elements, one block
Mutant missing_barrier, barrier_in_branch, exit_before_barrier, two_barriers, shuffle_in_branch,
    exit_before_shuffle, missing_lane, missing_warp_sync, unwritten_shared, one_barrier_per_round;
// races.cu: int32 elements, several blocks
Mutant plain_counter, plain_shared_counter, same_element, neighbour_in_place, last_block_sum,
    spin_for_block;
// tensor_cores.cu: half elements
Mutant copy_without_wait, copy_without_commit, copy_wait_for_older, copy_without_barrier,
    copy_over_readers, copy_misaligned, matrix_without_sync, swapped_fragments;

}  // namespace llmserve::mutants
