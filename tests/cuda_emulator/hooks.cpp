// Answers the calls that -fsanitize=thread puts before each load and store of a kernel's file. The
// sanitizer's own library is not linked.
#include <cstddef>
#include <cstdint>

#include "state.h"

namespace {

using llmserve::cuda::emulated::Access;
using llmserve::cuda::emulated::current;
using llmserve::cuda::emulated::kStackBytes;

__attribute__((always_inline)) inline void see(const void* address, size_t bytes, size_t alignment,
                                               Access access, const void* place) {
  if (current == nullptr) {
    llmserve::cuda::emulated::check_host_access(address, bytes);
    return;
  }
  if (reinterpret_cast<uintptr_t>(address) - current->stack < kStackBytes) return;
  llmserve::cuda::emulated::check_access(address, bytes, alignment, access, place);
}

}  // namespace

#define LLMSERVE_HOOKS(bytes)                                                         \
  void __tsan_read##bytes(void* address) {                                            \
    see(address, bytes, bytes, Access::kRead, __builtin_return_address(0));           \
  }                                                                                   \
  void __tsan_write##bytes(void* address) {                                           \
    see(address, bytes, bytes, Access::kWrite, __builtin_return_address(0));          \
  }                                                                                   \
  void __tsan_unaligned_read##bytes(void* address) {                                  \
    see(address, bytes, 1, Access::kRead, __builtin_return_address(0));               \
  }                                                                                   \
  void __tsan_unaligned_write##bytes(void* address) {                                 \
    see(address, bytes, 1, Access::kWrite, __builtin_return_address(0));              \
  }

extern "C" {

LLMSERVE_HOOKS(1)
LLMSERVE_HOOKS(2)
LLMSERVE_HOOKS(4)
LLMSERVE_HOOKS(8)
LLMSERVE_HOOKS(16)

void __tsan_read_range(void* address, size_t bytes) {
  see(address, bytes, 1, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  see(address, bytes, 1, Access::kWrite, __builtin_return_address(0));
}
void __tsan_init() {}

}  // extern "C"
