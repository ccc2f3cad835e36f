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

template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    act_mul_kernel(const Rows gate_up, const Activation activation, const Rows out,
                   const int64_t num_tokens, const int size, const bool is_vectorized) {
  const int64_t begin = group_begin();
  if (begin >= size) return;
  const int i = static_cast<int>(begin);
  for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    const T* const gate = row_of<T>(gate_up, token, 0);
    float values[kGroup], factors[kGroup];
    load_values(gate, i, size, is_vectorized, values);
    load_values(gate + size, i, size, is_vectorized, factors);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = activate(values[j], activation) * factors[j];
    store_values(row_of<T>(out, token, 0), i, size, is_vectorized, values);
  }
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    embedding_kernel(const int64_t* ids, const Rows table, const int64_t num_rows,
                     const float scale, float* out, const int64_t num_tokens, const int size,
                     const bool is_vectorized) {
  const int64_t begin = group_begin();
  if (begin >= size) return;
  const int i = static_cast<int>(begin);
  for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    const int64_t id = ids[token];
    float values[kGroup] = {};
    if (id >= 0 && id < num_rows) {
      load_values(row_of<T>(table, id, 0), i, size, is_vectorized, values);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] *= scale;
    store_values(out + token * size, i, size, is_vectorized, values);
  }
}

__global__ void __launch_bounds__(kNumThreads)
    softcap_kernel(float* x, const int64_t count, const float cap, const bool is_vectorized) {
  const int64_t begin = group_begin();
  if (begin >= count) return;
  const int size = static_cast<int>(min<int64_t>(count - begin, kGroup));
  const bool is_whole = is_vectorized && size == kGroup;
  float values[kGroup];
  load_values(x + begin, 0, size, is_whole, values);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) values[j] = cap * tanhf(values[j] / cap);
  store_values(x + begin, 0, size, is_whole, values);
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    add_bias_kernel(const Rows x, const float* bias, const int64_t num_tokens, const int size,
                    const bool is_vectorized) {
  const int64_t begin = group_begin();
  if (begin >= size) return;
  const int i = static_cast<int>(begin);
  float added[kGroup];
  load_values(bias, i, size, is_vectorized, added);
  for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    T* const row = row_of<T>(x, token, 0);
    float values[kGroup];
    load_values(row, i, size, is_vectorized, values);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] += added[j];
    store_values(row, i, size, is_vectorized, values);
  }
}

}  // namespace

void act_mul(Rows gate_up, Activation activation, Rows out, int64_t num_tokens, int64_t size,
             Stream stream) {
  const bool is_vectorized = size % kGroup == 0 && is_aligned(gate_up) && is_aligned(out);
  with_type(out.type, [&](auto tag) {
    launch(act_mul_kernel<typename decltype(tag)::type>, row_grid(num_tokens, size),
           Dim3(kNumThreads), 0, stream, gate_up, activation, out, num_tokens,
           static_cast<int>(size), is_vectorized);
  });
}

void embedding(const int64_t* ids, Rows table, int64_t num_rows, float scale, float* out,
               int64_t num_tokens, int64_t size, Stream stream) {
  const bool is_vectorized = size % kGroup == 0 && is_aligned(table) && is_aligned(out);
  with_type(table.type, [&](auto tag) {
    launch(embedding_kernel<typename decltype(tag)::type>, row_grid(num_tokens, size),
           Dim3(kNumThreads), 0, stream, ids, table, num_rows, scale, out, num_tokens,
           static_cast<int>(size), is_vectorized);
  });
}

void softcap(float* x, int64_t count, float cap, Stream stream) {
  launch(softcap_kernel, row_grid(min<int64_t>(count, 1), count), Dim3(kNumThreads), 0, stream, x,
         count, cap, is_aligned(x));
}

void add_bias(Rows x, const float* bias, int64_t num_tokens, int64_t size, Stream stream) {
  const bool is_vectorized = size % kGroup == 0 && is_aligned(x) && is_aligned(bias);
  with_type(x.type, [&](auto tag) {
    launch(add_bias_kernel<typename decltype(tag)::type>, row_grid(num_tokens, size),
           Dim3(kNumThreads), 0, stream, x, bias, num_tokens, static_cast<int>(size),
           is_vectorized);
  });
}

}  // namespace llmserve::cuda
