// The side of device.h that nvcc compiles: each name is one CUDA builtin or one PTX instruction.
// Included by device.h alone, which says what each name does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#define LLMSERVE_PRIMITIVE __device__ __forceinline__

// Static shared memory of N elements, seen through a Shared<T>.
#define LLMSERVE_SHARED(T, name, N)                                     \
  __shared__ __align__(16) unsigned char name##_bytes[(N) * sizeof(T)]; \
  const ::llmserve::cuda::Shared<T> name { reinterpret_cast<T*>(name##_bytes) }

namespace llmserve::cuda {

using half = __half;
using bfloat16 = __nv_bfloat16;
using fp8 = __nv_fp8_e4m3;
using Dim3 = dim3;

// Numbers

LLMSERVE_PRIMITIVE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
LLMSERVE_PRIMITIVE uint32_t float_to_bits(float value) { return __float_as_uint(value); }

LLMSERVE_PRIMITIVE float to_float(float value) { return value; }
LLMSERVE_PRIMITIVE float to_float(half value) { return __half2float(value); }
LLMSERVE_PRIMITIVE float to_float(bfloat16 value) { return __bfloat162float(value); }
LLMSERVE_PRIMITIVE float to_float(fp8 value) { return static_cast<float>(value); }

template <typename T>
LLMSERVE_PRIMITIVE T from_float(float value);
template <>
LLMSERVE_PRIMITIVE float from_float<float>(float value) {
  return value;
}
template <>
LLMSERVE_PRIMITIVE half from_float<half>(float value) {
  return __float2half_rn(value);
}
template <>
LLMSERVE_PRIMITIVE bfloat16 from_float<bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
LLMSERVE_PRIMITIVE fp8 from_float<fp8>(float value) {
  return fp8(value);
}

template <typename T>
LLMSERVE_PRIMITIVE uint32_t pack_pair(float low, float high);
template <>
LLMSERVE_PRIMITIVE uint32_t pack_pair<half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
LLMSERVE_PRIMITIVE uint32_t pack_pair<bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
LLMSERVE_PRIMITIVE void unpack_pair(uint32_t word, float& low, float& high);
template <>
LLMSERVE_PRIMITIVE void unpack_pair<half>(uint32_t word, float& low, float& high) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
  low = pair.x;
  high = pair.y;
}
template <>
LLMSERVE_PRIMITIVE void unpack_pair<bfloat16>(uint32_t word, float& low, float& high) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}

LLMSERVE_PRIMITIVE uint32_t pack_fp8(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

LLMSERVE_PRIMITIVE void unpack_fp8(uint32_t word, float (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> 16 * i);
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    out[2 * i] = values.x;
    out[2 * i + 1] = values.y;
  }
}

LLMSERVE_PRIMITIVE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
LLMSERVE_PRIMITIVE float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
LLMSERVE_PRIMITIVE float fast_divide(float a, float b) { return __fdividef(a, b); }

LLMSERVE_PRIMITIVE float multiply(float a, float b) { return __fmul_rn(a, b); }

LLMSERVE_PRIMITIVE int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
LLMSERVE_PRIMITIVE uint32_t mul_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
LLMSERVE_PRIMITIVE int popcount(uint32_t x) { return __popc(x); }
LLMSERVE_PRIMITIVE int leading_zeros(uint32_t x) { return __clz(static_cast<int>(x)); }
LLMSERVE_PRIMITIVE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// Global memory

LLMSERVE_PRIMITIVE Vec16 load16(const void* address) {
  return *static_cast<const Vec16*>(address);
}

LLMSERVE_PRIMITIVE Vec16 load16_streaming(const void* address) {
  Vec16 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
      : "l"(__cvta_generic_to_global(address)));
  return v;
}

LLMSERVE_PRIMITIVE void store16(void* address, Vec16 v) { *static_cast<Vec16*>(address) = v; }

LLMSERVE_PRIMITIVE void thread_fence() { __threadfence(); }

// Shared memory

template <typename T>
struct Shared {
  T* address;

  LLMSERVE_PRIMITIVE T& operator[](int i) const { return address[i]; }
  LLMSERVE_PRIMITIVE Shared operator+(int offset) const { return {address + offset}; }
  LLMSERVE_PRIMITIVE Vec16 load16(int i) const {
    return *reinterpret_cast<const Vec16*>(address + i);
  }
  LLMSERVE_PRIMITIVE void store16(int i, Vec16 v) const {
    *reinterpret_cast<Vec16*>(address + i) = v;
  }
  template <typename U>
  LLMSERVE_PRIMITIVE Shared<U> as() const {
    return {reinterpret_cast<U*>(address)};
  }
};

class SharedMemory {
 public:
  template <typename T>
  LLMSERVE_PRIMITIVE Shared<T> take(int count) {
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
    T* const address = reinterpret_cast<T*>(dynamic_shared_memory + used_);
    used_ += (static_cast<uint32_t>(count) * sizeof(T) + 15) / 16 * 16;
    return {address};
  }

 private:
  uint32_t used_ = 0;
};

LLMSERVE_PRIMITIVE uint32_t shared_address(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// Block and warp

constexpr unsigned kAllLanes = 0xffffffffu;

LLMSERVE_PRIMITIVE void block_sync() { __syncthreads(); }
LLMSERVE_PRIMITIVE void warp_sync() { __syncwarp(); }

template <typename T>
LLMSERVE_PRIMITIVE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
template <typename T>
LLMSERVE_PRIMITIVE T shuffle(T value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
template <typename T>
LLMSERVE_PRIMITIVE T shuffle_down(T value, int distance) {
  return __shfl_down_sync(kAllLanes, value, distance);
}
template <typename T>
LLMSERVE_PRIMITIVE T shuffle_up(T value, int distance) {
  return __shfl_up_sync(kAllLanes, value, distance);
}
LLMSERVE_PRIMITIVE bool warp_any(bool predicate) { return __any_sync(kAllLanes, predicate) != 0; }
LLMSERVE_PRIMITIVE bool warp_all(bool predicate) { return __all_sync(kAllLanes, predicate) != 0; }
LLMSERVE_PRIMITIVE uint32_t warp_ballot(bool predicate) {
  return __ballot_sync(kAllLanes, predicate);
}

LLMSERVE_PRIMITIVE int atomic_add(int* address, int value) { return atomicAdd(address, value); }
LLMSERVE_PRIMITIVE unsigned atomic_add(unsigned* address, unsigned value) {
  return atomicAdd(address, value);
}
LLMSERVE_PRIMITIVE int64_t atomic_add(int64_t* address, int64_t value) {
  using Word = unsigned long long;
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<Word*>(address), static_cast<Word>(value)));
}
LLMSERVE_PRIMITIVE float atomic_add(float* address, float value) {
  return atomicAdd(address, value);
}
LLMSERVE_PRIMITIVE int atomic_max(int* address, int value) { return atomicMax(address, value); }
LLMSERVE_PRIMITIVE int atomic_min(int* address, int value) { return atomicMin(address, value); }

// Asynchronous copies and tensor cores

template <typename T>
LLMSERVE_PRIMITIVE void copy_async16(Shared<T> dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(dst.address)), "l"(__cvta_generic_to_global(src)),
                 "r"(valid ? 16 : 0)
               : "memory");
}
LLMSERVE_PRIMITIVE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
LLMSERVE_PRIMITIVE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

template <typename T>
LLMSERVE_PRIMITIVE void load_matrix_x4(uint32_t (&r)[4], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row.address))
               : "memory");
}
template <typename T>
LLMSERVE_PRIMITIVE void load_matrix_x4_trans(uint32_t (&r)[4], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row.address))
               : "memory");
}

template <typename T>
LLMSERVE_PRIMITIVE void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>);
  if constexpr (std::is_same_v<T, half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Host

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), Dim3 grid, Dim3 block, size_t dynamic_shared_bytes,
            Stream stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (dynamic_shared_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(dynamic_shared_bytes)),
               "cannot set the shared memory of a kernel");
  }
  kernel<<<grid, block, dynamic_shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check_cuda(cudaGetLastError(), "cannot launch a kernel");
}

// An attribute of the current device. Devices differ, so the answers are kept per device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kMaxDevices = 64;
  static int values[kMaxDevices] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "no CUDA device");
  int& value = values[device % kMaxDevices];
  if (value == 0) {
    check_cuda(cudaDeviceGetAttribute(&value, kAttribute, device), "cannot read the CUDA device");
  }
  return value;
}

inline int num_multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

inline size_t max_shared_bytes() {
  return static_cast<size_t>(device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>());
}

}  // namespace llmserve::cuda
