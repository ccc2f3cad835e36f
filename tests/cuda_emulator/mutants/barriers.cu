// Mutants whose threads do not meet, or do not wait for what the others write.
#include "llmserve/cuda/device.h"
#include "mutants.h"

namespace llmserve::mutants {

using namespace llmserve::cuda;

namespace {

constexpr int kThreads = 64;

// Reverses 64 elements.
template <bool kBroken>
__global__ void missing_barrier_kernel(const float* x, float* out, int) {
  LLMSERVE_SHARED(float, tile, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  tile[i] = x[i];
  if (!kBroken) block_sync();
  out[i] = tile[kThreads - 1 - i];
}

template <bool kBroken>
__global__ void barrier_in_branch_kernel(const float* x, float* out, int) {
  LLMSERVE_SHARED(float, tile, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  tile[i] = x[i];
  if (!kBroken || i != 40) block_sync();
  out[i] = tile[i];
}

template <bool kBroken>
__global__ void exit_before_barrier_kernel(const float* x, float* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (kBroken && i >= n) return;
  const float value = i < n ? x[i] : 0.0f;
  block_sync();
  if (i < n) out[i] = value;
}

template <bool kBroken>
__global__ void two_barriers_kernel(const float* x, float* out, int) {
  const int i = static_cast<int>(threadIdx.x);
  if (kBroken && i < 32) {
    out[i] = x[i];
    block_sync();
  } else {
    out[i] = x[i];
    block_sync();
  }
}

template <bool kBroken>
__global__ void shuffle_in_branch_kernel(const float* x, float* out, int) {
  const int i = static_cast<int>(threadIdx.x);
  float value = x[i];
  if (!kBroken || i % 32 < 16) value = shuffle_xor(value, 1);
  out[i] = value;
}

template <bool kBroken>
__global__ void exit_before_shuffle_kernel(const float* x, float* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (kBroken && i >= n) return;
  const float sum = warp_sum(i < n ? x[i] : 0.0f);
  if (i < n) out[i] = sum;
}

// In a block of 40 threads the second warp has 8 lanes.
template <bool kBroken>
__global__ void missing_lane_kernel(const float* x, float* out, int) {
  const int i = static_cast<int>(threadIdx.x);
  out[i] = shuffle_xor(x[i], kBroken ? 8 : 4);
}

template <bool kBroken>
__global__ void missing_warp_sync_kernel(const float* x, float* out, int) {
  LLMSERVE_SHARED(float, tile, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  tile[i] = x[i];
  if (!kBroken) warp_sync();
  out[i] = tile[i ^ 1];
}

template <bool kBroken>
__global__ void unwritten_shared_kernel(const float* x, float* out, int n) {
  LLMSERVE_SHARED(float, tile, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  if (!kBroken || i < n) tile[i] = i < n ? x[i] : 0.0f;
  block_sync();
  if (i < n) out[i] = tile[i] + tile[kThreads - 1];
}

// Each round overwrites what slower threads may still read of the round before.
template <bool kBroken>
__global__ void one_barrier_per_round_kernel(const float* x, float* out, int n) {
  LLMSERVE_SHARED(float, tile, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    tile[i] = x[i] + static_cast<float>(round);
    block_sync();
    sum += tile[kThreads - 1 - i];
    if (!kBroken) block_sync();
  }
  if (i < n) out[i] = sum;
}

template <typename Kernel>
void run(Kernel kernel, void* out, const void* x, int n, unsigned num_threads = kThreads) {
  launch(kernel, 1, num_threads, 0, nullptr, static_cast<const float*>(x),
         static_cast<float*>(out), n);
}

}  // namespace

void missing_barrier(bool broken, void* out, const void* x, int n) {
  run(broken ? missing_barrier_kernel<true> : missing_barrier_kernel<false>, out, x, n);
}

void barrier_in_branch(bool broken, void* out, const void* x, int n) {
  run(broken ? barrier_in_branch_kernel<true> : barrier_in_branch_kernel<false>, out, x, n);
}

void exit_before_barrier(bool broken, void* out, const void* x, int n) {
  run(broken ? exit_before_barrier_kernel<true> : exit_before_barrier_kernel<false>, out, x, n);
}

void two_barriers(bool broken, void* out, const void* x, int n) {
  run(broken ? two_barriers_kernel<true> : two_barriers_kernel<false>, out, x, n);
}

void shuffle_in_branch(bool broken, void* out, const void* x, int n) {
  run(broken ? shuffle_in_branch_kernel<true> : shuffle_in_branch_kernel<false>, out, x, n);
}

void exit_before_shuffle(bool broken, void* out, const void* x, int n) {
  run(broken ? exit_before_shuffle_kernel<true> : exit_before_shuffle_kernel<false>, out, x, n);
}

void missing_lane(bool broken, void* out, const void* x, int n) {
  run(broken ? missing_lane_kernel<true> : missing_lane_kernel<false>, out, x, n, 40);
}

void missing_warp_sync(bool broken, void* out, const void* x, int n) {
  run(broken ? missing_warp_sync_kernel<true> : missing_warp_sync_kernel<false>, out, x, n);
}

void unwritten_shared(bool broken, void* out, const void* x, int n) {
  run(broken ? unwritten_shared_kernel<true> : unwritten_shared_kernel<false>, out, x, n);
}

void one_barrier_per_round(bool broken, void* out, const void* x, int n) {
  run(broken ? one_barrier_per_round_kernel<true> : one_barrier_per_round_kernel<false>, out, x,
      n);
}

}  // namespace llmserve::mutants
