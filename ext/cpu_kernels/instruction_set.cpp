#include "llmserve/instruction_set.h"

#include <atomic>
#include <stdexcept>

namespace llmserve {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512_vnni", "avx512_bf16"};

InstructionSet best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return InstructionSet::kPortable;
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    return __builtin_cpu_supports("avx512bf16") ? InstructionSet::kAvx512Bf16
                                                : InstructionSet::kAvx512Vnni;
  }
  return InstructionSet::kAvx2;
#else
  return InstructionSet::kPortable;
#endif
}

std::atomic<InstructionSet> current{best()};

}  // namespace

InstructionSet get_instruction_set() { return current.load(std::memory_order_relaxed); }

std::vector<std::string> available_instruction_sets() {
  return {kNames, kNames + static_cast<int>(best()) + 1};
}

void set_instruction_set(const std::string& name) {
  const std::vector<std::string> available = available_instruction_sets();
  for (size_t i = 0; i < available.size(); ++i) {
    if (available[i] != name) continue;
    current.store(static_cast<InstructionSet>(i));
    return;
  }
  throw std::invalid_argument("instruction set " + name + " is not available on this CPU");
}

}  // namespace llmserve
