// The only CUDA header of the kernels in ext/cuda_kernels. nvcc maps it to CUDA (device_nvcc.h); g++
// with -DLLMSERVE_EMULATED maps it to tests/cuda_emulator/emulator.h, which runs the same sources on
// the CPU and checks them. Kernels use nothing of CUDA but what is listed here.
//
// Included by .cu files alone. Their launchers are declared in llmserve/cuda/<file>.h, which includes
// llmserve/cuda/stream.h and no more.
//
// As in CUDA
//   __global__, __device__, __host__, __forceinline__, __launch_bounds__(threads, blocks), __restrict__,
//   threadIdx, blockIdx, blockDim, gridDim (.x .y .z), #pragma unroll, expf, sinf, cosf, rsqrtf,
//   fmaf, fminf, fmaxf, tanhf, erff, ... of <math.h>. `static constexpr` arrays may be read by kernels
//   as a constant index folds them; no other globals.
// Global memory
//   plain pointers: x[i] is checked (bounds, alignment, races) by the emulator like everything else.
//   Vec16               16 bytes, `uint32_t w[4]`
//   Vec16 load16(const void*)            16-byte load; the address must be a multiple of 16
//   Vec16 load16_streaming(const void*)  the same for bytes that nobody writes during the kernel and
//                                        that are read once: stays out of L1
//   void store16(void*, Vec16)
//   void thread_fence()                  __threadfence
// Numbers
//   half, bfloat16, fp8 (e4m3)           storage types; all arithmetic is in float
//   float to_float(T)                    T: float, half, bfloat16, fp8
//   T from_float<T>(float)               to nearest even; fp8 saturates at 448, NaN stays NaN
//   void unpack<T>(Vec16, float (&)[16 / sizeof(T)])      element order as in memory
//   Vec16 pack<T>(const float (&)[16 / sizeof(T)])
//   uint32_t pack_pair<T>(float low, float high)          T: half, bfloat16; `low` in the low half
//   void unpack_pair<T>(uint32_t, float& low, float& high)
//   void unpack_fp8(uint32_t, float (&)[4])               four e4m3, lowest byte first
//   float bits_to_float(uint32_t), uint32_t float_to_bits(float)
//   float fast_exp2(float), fast_log2(float), fast_divide(float, float)   approximate, see docs/cuda.md
//   float multiply(float, float)         rounded by itself, never fused with a sum
//   min(a, b), max(a, b) of equal types, ceil_div(a, b)
//   int dot4(int a, int b, int c)        c + the dot product of four int8 (dp4a)
//   uint32_t mul_high(uint32_t, uint32_t), int popcount(uint32_t), int leading_zeros(uint32_t)
//   uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector)      __byte_perm
// Shared memory
//   LLMSERVE_SHARED(T, name, N);         static, 16-byte aligned; `name` is a Shared<T>. At the kernel's
//                                        (or a __device__ function's) block scope.
//   SharedMemory memory;                 dynamic: as many bytes as the launch said; at the kernel's
//   Shared<T> x = memory.take<T>(n);     outermost scope; takes follow each other, 16-byte aligned,
//                                        each rounded up to 16 bytes: `shared_bytes<T>(n)` on the host
//   Shared<T>: x[i], x + offset, x.load16(i) and x.store16(i, v) (i in elements, the address a
//              multiple of 16 bytes), x.as<U>() (the same bytes as another type). Copied by value.
// A block, all of its threads together, at one place of the source (else the emulator reports):
//   block_sync()                         __syncthreads
//   float block_sum(float, Shared<float> scratch), block_max(...)   scratch: 32 floats, free again after
//                                        the next block_sync(); every thread gets the same result, in a
//                                        fixed order; blockDim.y and z must be 1
// A warp, all of its 32 lanes together (lane = threadIdx.x % 32 in one-dimensional blocks):
//   warp_sync()                          orders shared memory within the warp (shuffles and votes do not)
//   T shuffle_xor(T, int mask), shuffle(T, int lane), shuffle_down(T, int d), shuffle_up(T, int d)
//                                        T of 4 or 8 bytes: int, unsigned, float, int64_t, double
//   bool warp_any(bool), warp_all(bool); uint32_t warp_ballot(bool)
//   float warp_sum(float), warp_max(float): every lane gets the same bits; T group_sum<N>(T) and
//   group_max<N>: over N = 2, 4, 8, 16 neighbouring lanes (all 32 lanes take part, each in its group)
//   int lane_id(), warp_id()
// Atomics on global or shared addresses (&x[i]); all return the old value:
//   atomic_add(int*, unsigned*, int64_t*, float*), atomic_max(int*), atomic_min(int*)
// Asynchronous copies into shared memory (cp.async, 16 bytes, not through L1):
//   copy_async16(Shared<T> dst, const void* src, bool valid)   zeros when not valid; src then not read
//   copy_commit(); copy_wait<N>()        waits until at most N of the thread's own newest groups are
//                                        under way. Other threads see the data after a block_sync().
// Tensor cores (whole warps):
//   load_matrix_x4(uint32_t (&r)[4], Shared<T> row), load_matrix_x4_trans(...)
//                                        ldmatrix: lane l gives the address of row l % 8 of matrix l / 8
//   mma_16816<T>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])   d += a * b, T: half,
//                                        bfloat16; fragments as PTX mma.m16n8k16 has them: with g = lane
//                                        / 4, t = lane % 4: a[0] row g, a[1] row g + 8, columns 2t, 2t + 1;
//                                        a[2], a[3] the same at columns + 8; b[0] column g, rows 2t,
//                                        2t + 1; b[1] rows + 8; d[0], d[1] row g, columns 2t, 2t + 1;
//                                        d[2], d[3] row g + 8
// Host
//   Dim3{x, y, z}
//   launch(kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes, Stream, arguments...)
//                                        an empty grid launches nothing; throws std::runtime_error
//   int num_multiprocessors(); size_t max_shared_bytes()   of the current device, cached. The
//                                        emulator has 4 and, as sm_89, 101376 bytes.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "llmserve/cuda/stream.h"

namespace llmserve::cuda {

struct alignas(16) Vec16 {
  uint32_t w[4];
};

constexpr int kWarpSize = 32;

}  // namespace llmserve::cuda

#ifdef LLMSERVE_EMULATED
#include "emulator.h"
#else
#include "llmserve/cuda/device_nvcc.h"
#endif

#define LLMSERVE_DEVICE __device__ __forceinline__
#define LLMSERVE_BOTH __host__ __device__ __forceinline__

namespace llmserve::cuda {

template <typename T>
LLMSERVE_BOTH constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
LLMSERVE_BOTH constexpr T max(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
LLMSERVE_BOTH constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Bytes that SharedMemory::take<T>(count) uses up.
template <typename T>
LLMSERVE_BOTH constexpr size_t shared_bytes(size_t count) {
  return (count * sizeof(T) + 15) / 16 * 16;
}

LLMSERVE_DEVICE int lane_id() { return static_cast<int>(threadIdx.x % kWarpSize); }

LLMSERVE_DEVICE int warp_id() { return static_cast<int>(threadIdx.x / kWarpSize); }

// Elements of 16 bytes as floats, in the order of memory.
template <typename T>
LLMSERVE_DEVICE void unpack(const Vec16& v, float (&out)[16 / sizeof(T)]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = bits_to_float(v.w[i]);
    } else if constexpr (sizeof(T) == 2) {
      unpack_pair<T>(v.w[i], out[2 * i], out[2 * i + 1]);
    } else {
      float four[4];
      unpack_fp8(v.w[i], four);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[4 * i + j] = four[j];
    }
  }
}

template <typename T>
LLMSERVE_DEVICE Vec16 pack(const float (&values)[16 / sizeof(T)]) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v.w[i] = float_to_bits(values[i]);
    } else if constexpr (sizeof(T) == 2) {
      v.w[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
    } else {
      v.w[i] = pack_fp8(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
  }
  return v;
}

// Sum over groups of N neighbouring lanes. The butterfly adds the same pairs in every lane, so all
// lanes of a group get the same bits.
template <int N, typename T>
LLMSERVE_DEVICE T group_sum(T value) {
#pragma unroll
  for (int mask = N / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

template <int N, typename T>
LLMSERVE_DEVICE T group_max(T value) {
#pragma unroll
  for (int mask = N / 2; mask > 0; mask /= 2) value = max(value, shuffle_xor(value, mask));
  return value;
}

LLMSERVE_DEVICE float warp_sum(float value) { return group_sum<kWarpSize>(value); }

LLMSERVE_DEVICE float warp_max(float value) { return group_max<kWarpSize>(value); }

// Sum over a one-dimensional block of whole warps. scratch: 32 floats. Starts with a barrier, so that
// scratch may have been used for an earlier sum.
LLMSERVE_DEVICE float block_sum(float value, Shared<float> scratch) {
  value = warp_sum(value);
  block_sync();
  if (lane_id() == 0) scratch[warp_id()] = value;
  block_sync();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  return warp_sum(lane_id() < num_warps ? scratch[lane_id()] : 0.0f);
}

LLMSERVE_DEVICE float block_max(float value, Shared<float> scratch) {
  value = warp_max(value);
  block_sync();
  if (lane_id() == 0) scratch[warp_id()] = value;
  block_sync();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  return warp_max(lane_id() < num_warps ? scratch[lane_id()] : -INFINITY);
}

}  // namespace llmserve::cuda
