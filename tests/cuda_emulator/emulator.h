// The side of llmserve/cuda/device.h that g++ compiles: the same names, run on the CPU and checked.
//
// The threads of a block are fibers of one operating system thread (scheduler.cpp). They change over
// only inside the calls below that meet other threads. Plain loads and stores through pointers are
// seen as well: kernels are compiled with -fsanitize=thread, whose calls hooks.cpp answers.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define threadIdx (::llmserve::cuda::emulated::thread_index())
#define blockIdx (::llmserve::cuda::emulated::block_index())
#define blockDim (::llmserve::cuda::emulated::block_size())
#define gridDim (::llmserve::cuda::emulated::grid_size())

// The address of the constant tells the places (and the template instances) apart.
#define LLMSERVE_SHARED(T, name, N)                                                       \
  static const char name##_place = 0;                                                     \
  const ::llmserve::cuda::Shared<T> name = ::llmserve::cuda::emulated::static_shared<T>( \
      N, &name##_place)

// Where a collective call stands in the source: all threads of one meeting must agree.
#define LLMSERVE_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace llmserve::cuda {

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

template <typename T>
struct Shared;

namespace emulated {

struct Index {
  unsigned x, y, z;
};

// Constant, as no fiber ever sees another value.
__attribute__((const)) Index thread_index();
__attribute__((const)) Index block_index();
__attribute__((const)) Index block_size();
__attribute__((const)) Index grid_size();

enum class Shuffle { kXor, kIndex, kDown, kUp };

void block_sync(const char* file, int line);
void warp_sync(const char* file, int line);
uint64_t shuffle(Shuffle kind, uint64_t value, int argument, const char* file, int line);
uint32_t ballot(bool predicate, const char* file, int line);
void load_matrix(uint32_t* r, const void* row, bool transposed, const char* file, int line);
void mma(bool is_half, float* d, const uint32_t* a, const uint32_t* b, const char* file, int line);

Vec16 load16(const void* address);
void store16(void* address, const Vec16& v);
void copy_async16(void* dst, const void* src, bool valid);
void copy_commit();
void copy_wait(int num_pending);
void thread_fence();

[[noreturn]] void outside_shared(int64_t index, int64_t count);
void* static_shared_bytes(size_t bytes, const void* place);
void* dynamic_shared_bytes(size_t offset, size_t bytes);

// Runs `body(context)` once per thread; `context_bytes` of the context hold the kernel's parameters.
// Throws std::runtime_error with the first finding.
void run(const void* kernel, Dim3 grid, Dim3 block, size_t dynamic_shared_bytes,
         void (*body)(void*), void* context, size_t context_bytes);

template <typename T>
Shared<T> static_shared(size_t count, const void* place) {
  T* const begin = static_cast<T*>(static_shared_bytes(count * sizeof(T), place));
  return {begin, begin, begin + count};
}

}  // namespace emulated

// Part of an array in shared memory. Indices outside the array are findings.
template <typename T>
struct Shared {
  T* address;
  T* begin;
  T* end;

  T& operator[](int i) const {
    check(i, 1);
    return address[i];
  }
  Shared operator+(int offset) const { return {address + offset, begin, end}; }
  Vec16 load16(int i) const {
    check(i, 16 / sizeof(T));
    return emulated::load16(address + i);
  }
  void store16(int i, Vec16 v) const {
    check(i, 16 / sizeof(T));
    emulated::store16(address + i, v);
  }
  template <typename U>
  Shared<U> as() const {
    return {reinterpret_cast<U*>(address), reinterpret_cast<U*>(begin), reinterpret_cast<U*>(end)};
  }
  void check(int i, int count) const {
    if (address + i < begin || address + i + count > end) {
      emulated::outside_shared(address + i - begin, end - begin);
    }
  }
};

class SharedMemory {
 public:
  template <typename T>
  Shared<T> take(int count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    T* const begin = static_cast<T*>(emulated::dynamic_shared_bytes(used_, bytes));
    used_ += (bytes + 15) / 16 * 16;
    return {begin, begin, begin + count};
  }

 private:
  size_t used_ = 0;
};

// Global memory

inline Vec16 load16(const void* address) { return emulated::load16(address); }
inline Vec16 load16_streaming(const void* address) { return emulated::load16(address); }
inline void store16(void* address, Vec16 v) { emulated::store16(address, v); }
inline void thread_fence() { emulated::thread_fence(); }

// Block and warp

inline void block_sync(LLMSERVE_PLACE) { emulated::block_sync(file, line); }
inline void warp_sync(LLMSERVE_PLACE) { emulated::warp_sync(file, line); }

template <typename T>
T shuffle_value(emulated::Shuffle kind, T value, int argument, const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = emulated::shuffle(kind, bits, argument, file, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
T shuffle_xor(T value, int mask, LLMSERVE_PLACE) {
  return shuffle_value(emulated::Shuffle::kXor, value, mask, file, line);
}
template <typename T>
T shuffle(T value, int lane, LLMSERVE_PLACE) {
  return shuffle_value(emulated::Shuffle::kIndex, value, lane, file, line);
}
template <typename T>
T shuffle_down(T value, int distance, LLMSERVE_PLACE) {
  return shuffle_value(emulated::Shuffle::kDown, value, distance, file, line);
}
template <typename T>
T shuffle_up(T value, int distance, LLMSERVE_PLACE) {
  return shuffle_value(emulated::Shuffle::kUp, value, distance, file, line);
}
inline uint32_t warp_ballot(bool predicate, LLMSERVE_PLACE) {
  return emulated::ballot(predicate, file, line);
}
inline bool warp_any(bool predicate, LLMSERVE_PLACE) {
  return emulated::ballot(predicate, file, line) != 0;
}
inline bool warp_all(bool predicate, LLMSERVE_PLACE) {
  return emulated::ballot(!predicate, file, line) == 0;
}

// Atomics: not inlined, so that their accesses are not taken for plain ones.

int atomic_add(int* address, int value);
unsigned atomic_add(unsigned* address, unsigned value);
int64_t atomic_add(int64_t* address, int64_t value);
float atomic_add(float* address, float value);
int atomic_max(int* address, int value);
int atomic_min(int* address, int value);

// Asynchronous copies and tensor cores

template <typename T>
void copy_async16(Shared<T> dst, const void* src, bool valid) {
  dst.check(0, 16 / sizeof(T));
  emulated::copy_async16(dst.address, src, valid);
}
inline void copy_commit() { emulated::copy_commit(); }
template <int N>
void copy_wait() {
  emulated::copy_wait(N);
}

template <typename T>
void load_matrix_x4(uint32_t (&r)[4], Shared<T> row, LLMSERVE_PLACE) {
  row.check(0, 16 / sizeof(T));
  emulated::load_matrix(r, row.address, false, file, line);
}
template <typename T>
void load_matrix_x4_trans(uint32_t (&r)[4], Shared<T> row, LLMSERVE_PLACE) {
  row.check(0, 16 / sizeof(T));
  emulated::load_matrix(r, row.address, true, file, line);
}
template <typename T>
void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], LLMSERVE_PLACE) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>);
  emulated::mma(std::is_same_v<T, half>, d, a, b, file, line);
}

// Host

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), Dim3 grid, Dim3 block, size_t dynamic_shared_bytes,
            Stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } call{kernel, {arguments...}};
  const auto body = [](void* context) {
    const Call& self = *static_cast<const Call*>(context);
    std::apply(self.kernel, self.parameters);
  };
  emulated::run(reinterpret_cast<const void*>(kernel), grid, block, dynamic_shared_bytes, body,
                &call, sizeof call);
}

inline int num_multiprocessors() { return 4; }
inline size_t max_shared_bytes() { return 101376; }

}  // namespace llmserve::cuda
