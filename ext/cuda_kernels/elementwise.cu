// Gated activation, embedding, soft-cap and bias: one thread per group of eight values.
#include "llmserve/cuda/elementwise.h"
#include "llmserve/cuda/row_values.h"

namespace llmserve::cuda {
namespace {

constexpr int kNumThreads = 256;
constexpr int64_t kMaxGridY = 65535;

// The first value of the thread's group in a row.
LLMSERVE_DEVICE int64_t group_begin() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kGroup;
}

// Blocks of a row side by side, rows below each other; kernels stride over what is left of them.
Dim3 row_grid(int64_t num_rows, int64_t row_size) {
  return Dim3(static_cast<unsigned>(ceil_div<int64_t>(row_size, kGroup * kNumThreads)),
              static_cast<unsigned>(min(num_rows, kMaxGridY)));
}

LLMSERVE_DEVICE float activate(float x, Activation activation) {
  if (activation == Activation::kSilu) return x / (1.0f + expf(-x));
  if (activation == Activation::kGeluTanh) {
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    return 0.5f * x * (1.0f + tanhf(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
  }
  constexpr float kSqrtHalf = 0.7071067811865476f;
  return 0.5f * x * erfcf(-x * kSqrtHalf);  // erfc, because 1 + erf cancels in the left tail
}

template <typename T, bool kVectorized>
__global__ void __launch_bounds__(kNumThreads)
    act_mul_kernel(const Rows gate_up, const Activation activation, const Rows out,
                   const int64_t num_tokens, const int size) {
  const int64_t begin = group_begin();
  if (begin >= size) return;
  const int i = static_cast<int>(begin);
  for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    const T* const gate = row_of<T>(gate_up, token, 0);
    float values[kGroup], factors[kGroup];
    load_values<kVectorized>(gate, i, size, values);
    load_values<kVectorized>(gate + size, i, size, factors);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = activate(values[j], activation) * factors[j];
    store_values<kVectorized>(row_of<T>(out, token, 0), i, size, values);
  }
}

template <typename T, bool kVectorized>
__global__ void __launch_bounds__(kNumThreads)
    embedding_kernel(const int64_t* ids, const Rows table, const int64_t num_rows,
                     const float scale, float* out, const int64_t num_tokens, const int size) {
  const int64_t begin = group_begin();
  if (begin >= size) return;
  const int i = static_cast<int>(begin);
  for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    const int64_t id = ids[token];
    float values[kGroup] = {};
    if (id >= 0 && id < num_rows) {
      load_values<kVectorized>(row_of<T>(table, id, 0), i, size, values);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] *= scale;
    store_values<kVectorized>(out + token * size, i, size, values);
  }
}

template <bool kVectorized>
__global__ void __launch_bounds__(kNumThreads)
    softcap_kernel(float* x, const int64_t count, const float cap) {
  const int64_t begin = group_begin();
  if (begin >= count) return;
  const int size = static_cast<int>(min<int64_t>(count - begin, kGroup));
  float values[kGroup];
  load_values<kVectorized>(x + begin, 0, size, values);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) values[j] = cap * tanhf(values[j] / cap);
  store_values<kVectorized>(x + begin, 0, size, values);
}

template <typename T, bool kVectorized>
__global__ void __launch_bounds__(kNumThreads)
    add_bias_kernel(const Rows x, const float* bias, const int64_t num_tokens, const int size) {
  const int64_t begin = group_begin();
  if (begin >= size) return;
  const int i = static_cast<int>(begin);
  float added[kGroup];
  load_values<kVectorized>(bias, i, size, added);
  for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    T* const row = row_of<T>(x, token, 0);
    float values[kGroup];
    load_values<kVectorized>(row, i, size, values);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] += added[j];
    store_values<kVectorized>(row, i, size, values);
  }
}

// Calls f(type tag, flag of kVectorized).
template <typename F>
void with_kernel(DType type, bool is_vectorized, const F& f) {
  with_type(type, [&](auto tag) { with_flag(is_vectorized, [&](auto flag) { f(tag, flag); }); });
}

}  // namespace

void act_mul(Rows gate_up, Activation activation, Rows out, int64_t num_tokens, int64_t size,
             Stream stream) {
  const bool is_vectorized = size % kGroup == 0 && is_aligned(gate_up) && is_aligned(out);
  with_kernel(out.type, is_vectorized, [&](auto tag, auto flag) {
    using T = typename decltype(tag)::type;
    launch(act_mul_kernel<T, decltype(flag)::value>, row_grid(num_tokens, size),
           Dim3(kNumThreads), 0, stream, gate_up, activation, out, num_tokens,
           static_cast<int>(size));
  });
}

void embedding(const int64_t* ids, Rows table, int64_t num_rows, float scale, float* out,
               int64_t num_tokens, int64_t size, Stream stream) {
  const bool is_vectorized = size % kGroup == 0 && is_aligned(table) && is_aligned(out);
  with_kernel(table.type, is_vectorized, [&](auto tag, auto flag) {
    using T = typename decltype(tag)::type;
    launch(embedding_kernel<T, decltype(flag)::value>, row_grid(num_tokens, size),
           Dim3(kNumThreads), 0, stream, ids, table, num_rows, scale, out, num_tokens,
           static_cast<int>(size));
  });
}

void softcap(float* x, int64_t count, float cap, Stream stream) {
  with_flag(is_aligned(x) && count % kGroup == 0, [&](auto flag) {
    launch(softcap_kernel<decltype(flag)::value>, row_grid(min<int64_t>(count, 1), count),
           Dim3(kNumThreads), 0, stream, x, count, cap);
  });
}

void add_bias(Rows x, const float* bias, int64_t num_tokens, int64_t size, Stream stream) {
  const bool is_vectorized = size % kGroup == 0 && is_aligned(x) && is_aligned(bias);
  with_kernel(x.type, is_vectorized, [&](auto tag, auto flag) {
    using T = typename decltype(tag)::type;
    launch(add_bias_kernel<T, decltype(flag)::value>, row_grid(num_tokens, size),
           Dim3(kNumThreads), 0, stream, x, bias, num_tokens, static_cast<int>(size));
  });
}

}  // namespace llmserve::cuda
