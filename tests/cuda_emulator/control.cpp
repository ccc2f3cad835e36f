// What tests tell the emulator that their library holds, through ctypes.
#include "memory.h"

#define LLMSERVE_CONTROL extern "C" __attribute__((visibility("default")))

namespace emulated = llmserve::cuda::emulated;

// One tensor, or several that overlap. Mirrored by _Buffer in device_memory.py.
struct ControlBuffer {
  uint64_t begin, num_bytes;
  const uint8_t* mask;
  const char* name;
};

LLMSERVE_CONTROL void llmserve_set_buffers(const ControlBuffer* buffers, int64_t count) {
  std::vector<emulated::Buffer> next;
  for (int64_t i = 0; i < count; ++i) {
    const ControlBuffer& b = buffers[i];
    next.push_back({b.begin, b.begin + b.num_bytes, b.mask, b.name, nullptr});
  }
  emulated::set_buffers(std::move(next));
}

// Valid until the next call.
LLMSERVE_CONTROL const char* llmserve_take_host_finding() {
  static std::string finding;
  finding = emulated::take_host_finding();
  return finding.c_str();
}
