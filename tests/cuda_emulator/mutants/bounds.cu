// Mutants that touch memory which is not theirs, or not all of it.
#include "llmserve/cuda/device.h"
#include "mutants.h"

namespace llmserve::mutants {

using namespace llmserve::cuda;

namespace {

constexpr int kThreads = 64;

template <bool kBroken>
__global__ void read_past_end_kernel(const float* x, float* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  const bool has_next = kBroken ? i < n : i + 1 < n;
  out[i] = x[i] + (has_next ? x[i + 1] : 0.0f);
}

template <bool kBroken>
__global__ void write_past_end_kernel(const float* x, float* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (kBroken ? i <= n : i < n) out[i] = x[min(i, n - 1)];
}

template <bool kBroken>
__global__ void write_before_start_kernel(const float* x, float* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    out[i] = x[i];
    if (kBroken || i > 0) out[i - (i > 0 ? 0 : 1)] = x[i];
  }
}

template <bool kBroken>
__global__ void misaligned_load_kernel(const float* x, float* out, int n) {
  const int i = 4 * static_cast<int>(threadIdx.x);
  if (i + 5 > n) return;
  float values[4];
  unpack<float>(load16(x + i + (kBroken ? 1 : 0)), values);
  for (int j = 0; j < 4; ++j) out[i + j] = values[j];
}

template <bool kBroken>
__global__ void misaligned_element_kernel(const float* x, float* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= n) return;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(x);
  const int shift = kBroken && i == 3 ? 2 : 0;
  out[i] = *reinterpret_cast<const float*>(bytes + 4 * i - shift);
}

// Rows of 3 elements, 4 apart.
template <bool kBroken>
__global__ void write_between_rows_kernel(const float* x, float* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= n) return;
  for (int j = 0; j < (kBroken ? 4 : 3); ++j) out[4 * i + j] = x[i];
}

template <bool kBroken>
__global__ void unwritten_tail_kernel(const float* x, float* out, int n) {
  const int limit = kBroken ? n / kThreads * kThreads : n;
  for (int i = static_cast<int>(threadIdx.x); i < limit; i += kThreads) out[i] = x[i];
}

template <bool kBroken>
__global__ void shared_index_kernel(const float* x, float* out, int n) {
  LLMSERVE_SHARED(float, first, kThreads);
  LLMSERVE_SHARED(float, second, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  first[i] = i < n ? x[i] : 0.0f;
  second[i] = 0.0f;
  block_sync();
  if (i < n) out[i] = first[kBroken ? i + 1 : (i + 1) % kThreads] + second[i];
}

template <bool kBroken>
__global__ void dynamic_shared_kernel(const float* x, float* out, int n) {
  SharedMemory memory;
  const Shared<float> first = memory.take<float>(n);
  const Shared<float> second = memory.take<float>(kBroken ? n + 1 : n);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    first[i] = x[i];
    second[i] = first[i];
    out[i] = second[i];
  }
}

template <bool kBroken>
__global__ void other_thread_stack_kernel(const float* x, float* out, int n) {
  float own[2] = {x[threadIdx.x], 0.0f};
  const auto address = reinterpret_cast<intptr_t>(&own[threadIdx.x & 1]);
  const auto* const first = reinterpret_cast<const float*>(shuffle(address, 0));
  if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = kBroken ? *first : own[0];
}

template <typename Kernel>
void run(Kernel kernel, void* out, const void* x, int n, size_t dynamic_shared_bytes = 0) {
  launch(kernel, static_cast<unsigned>(ceil_div(n, kThreads)), kThreads, dynamic_shared_bytes,
         nullptr, static_cast<const float*>(x), static_cast<float*>(out), n);
}

}  // namespace

void read_past_end(bool broken, void* out, const void* x, int n) {
  run(broken ? read_past_end_kernel<true> : read_past_end_kernel<false>, out, x, n);
}

void write_past_end(bool broken, void* out, const void* x, int n) {
  run(broken ? write_past_end_kernel<true> : write_past_end_kernel<false>, out, x, n);
}

void write_before_start(bool broken, void* out, const void* x, int n) {
  run(broken ? write_before_start_kernel<true> : write_before_start_kernel<false>, out, x, n);
}

void misaligned_load(bool broken, void* out, const void* x, int n) {
  run(broken ? misaligned_load_kernel<true> : misaligned_load_kernel<false>, out, x, n);
}

void misaligned_element(bool broken, void* out, const void* x, int n) {
  run(broken ? misaligned_element_kernel<true> : misaligned_element_kernel<false>, out, x, n);
}

void write_between_rows(bool broken, void* out, const void* x, int n) {
  run(broken ? write_between_rows_kernel<true> : write_between_rows_kernel<false>, out, x, n);
}

void unwritten_tail(bool broken, void* out, const void* x, int n) {
  launch(broken ? unwritten_tail_kernel<true> : unwritten_tail_kernel<false>, 1, kThreads, 0,
         nullptr, static_cast<const float*>(x), static_cast<float*>(out), n);
}

void shared_index(bool broken, void* out, const void* x, int n) {
  launch(broken ? shared_index_kernel<true> : shared_index_kernel<false>, 1, kThreads, 0, nullptr,
         static_cast<const float*>(x), static_cast<float*>(out), n);
}

void too_much_dynamic_shared(bool broken, void* out, const void* x, int n) {
  launch(broken ? dynamic_shared_kernel<true> : dynamic_shared_kernel<false>, 1, kThreads,
         2 * shared_bytes<float>(n), nullptr, static_cast<const float*>(x),
         static_cast<float*>(out), n);
}

void host_access(bool broken, void* out, const void* x, int n) {
  const float scale = broken ? static_cast<const float*>(x)[0] : 1.0f;
  run(scale > 1e30f ? read_past_end_kernel<true> : read_past_end_kernel<false>, out, x, n);
}

void other_thread_stack(bool broken, void* out, const void* x, int n) {
  run(broken ? other_thread_stack_kernel<true> : other_thread_stack_kernel<false>, out, x, n);
}

}  // namespace llmserve::mutants
