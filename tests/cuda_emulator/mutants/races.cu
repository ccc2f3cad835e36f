// Mutants that share memory without atomics, or between blocks.
#include "llmserve/cuda/device.h"
#include "mutants.h"

namespace llmserve::mutants {

using namespace llmserve::cuda;

namespace {

constexpr int kThreads = 64;
constexpr int kBlocks = 3;

// out[0] counts the elements above zero.
template <bool kBroken>
__global__ void plain_counter_kernel(const int* x, int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n || x[i] <= 0 || threadIdx.x != 0) return;
  if (kBroken) {
    out[0] += 1;
  } else {
    atomic_add(&out[0], 1);
  }
}

template <bool kBroken>
__global__ void plain_shared_counter_kernel(const int* x, int* out, int) {
  LLMSERVE_SHARED(int, count, 1);
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) count[0] = 0;
  block_sync();
  if (x[i] > 0) {
    if (kBroken) {
      count[0] += 1;
    } else {
      atomic_add(&count[0], 1);
    }
  }
  block_sync();
  if (i == 0) out[blockIdx.x] = count[0];
}

template <bool kBroken>
__global__ void same_element_kernel(const int* x, int* out, int) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  out[kBroken && i == kThreads ? i - 1 : i] = x[i];
}

// In place: each element becomes its sum with the next.
template <bool kBroken>
__global__ void neighbour_in_place_kernel(const int*, int* out, int) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int next = i + 1 < (kBroken ? kBlocks : static_cast<int>(blockIdx.x) + 1) * kThreads
                       ? out[i + 1]
                       : 0;
  block_sync();
  out[i] += next;
}

// out[0] counts finished blocks, out[1 + b] holds block b's sum, out[1 + kBlocks] the total.
template <bool kBroken>
__global__ void last_block_sum_kernel(const int* x, int* out, int) {
  LLMSERVE_SHARED(int, order, 1);
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < kThreads; ++i) sum += x[blockIdx.x * kThreads + i];
    out[1 + blockIdx.x] = sum;
    if (!kBroken) thread_fence();
    order[0] = atomic_add(&out[0], 1);
  }
  block_sync();
  if (order[0] != kBlocks - 1 || threadIdx.x != 0) return;
  int total = 0;
  for (int b = 0; b < kBlocks; ++b) total += out[1 + b];
  out[1 + kBlocks] = total;
}

template <bool kBroken>
__global__ void spin_for_block_kernel(const int* x, int* out, int) {
  if (threadIdx.x != 0) return;
  const volatile int* const flag = &out[kBlocks];
  if (kBroken && blockIdx.x == 0) {
    while (*flag == 0) {
    }
  }
  out[blockIdx.x] = x[blockIdx.x];
}

template <typename Kernel>
void run(Kernel kernel, void* out, const void* x, int n) {
  launch(kernel, kBlocks, kThreads, 0, nullptr, static_cast<const int*>(x),
         static_cast<int*>(out), n);
}

}  // namespace

void plain_counter(bool broken, void* out, const void* x, int n) {
  run(broken ? plain_counter_kernel<true> : plain_counter_kernel<false>, out, x, n);
}

void plain_shared_counter(bool broken, void* out, const void* x, int n) {
  run(broken ? plain_shared_counter_kernel<true> : plain_shared_counter_kernel<false>, out, x, n);
}

void same_element(bool broken, void* out, const void* x, int n) {
  run(broken ? same_element_kernel<true> : same_element_kernel<false>, out, x, n);
}

void neighbour_in_place(bool broken, void* out, const void* x, int n) {
  run(broken ? neighbour_in_place_kernel<true> : neighbour_in_place_kernel<false>, out, x, n);
}

void last_block_sum(bool broken, void* out, const void* x, int n) {
  run(broken ? last_block_sum_kernel<true> : last_block_sum_kernel<false>, out, x, n);
}

void spin_for_block(bool broken, void* out, const void* x, int n) {
  run(broken ? spin_for_block_kernel<true> : spin_for_block_kernel<false>, out, x, n);
}

}  // namespace llmserve::mutants
