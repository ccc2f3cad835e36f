// Loops over several threads. One pool of workers per process, started at first use; a worker
// that finds nothing to do spins for a moment, so that kernels that follow one another do not
// pay for waking it, and then sleeps.
#pragma once

#include <cstdint>
#include <type_traits>

namespace llmserve {

// Threads that a loop may use, the caller's included. At first: as many as the process may run on.
int get_num_threads();

// Raises std::invalid_argument if num_threads is below 1.
void set_num_threads(int num_threads);

// How many pieces of `size` elements cover n; the last may be smaller.
constexpr int64_t divide_up(int64_t n, int64_t size) { return (n + size - 1) / size; }

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);

void parallel_for_ranges(int64_t n, int64_t grain, RangeFunction function, void* context);

// Calls f(begin, end) on disjoint ranges that cover [0, n), from several threads, and returns when
// all are done. Each range but the last has a multiple of `grain` elements. Which thread runs which
// range is not fixed: a result that must not depend on the number of threads may not depend on the
// ranges. f must not throw. A loop inside a loop, or one that starts while another thread's loop is
// running, runs on its caller alone.
template <typename F>
void parallel_for(int64_t n, int64_t grain, F&& f) {
  using Function = std::remove_reference_t<F>;
  parallel_for_ranges(
      n, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Function*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace llmserve
