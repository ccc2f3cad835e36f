// The instruction set that kernels use, chosen when the module is loaded from what the CPU has.
#pragma once

#include <string>
#include <vector>

namespace llmserve {

// Ordered: a CPU that has one has those before it.
enum class InstructionSet {
  kPortable,    // what the compiler was told to assume
  kAvx2,        // AVX2, FMA, F16C
  kAvx512Vnni,  // AVX-512 F, BW, VL, VNNI
  kAvx512Bf16,  // and AVX-512 BF16
};

InstructionSet get_instruction_set();

// Names of the sets that this CPU has, from portable to best.
std::vector<std::string> available_instruction_sets();

// For tests and measurements. Raises std::invalid_argument if this CPU lacks the set.
void set_instruction_set(const std::string& name);

}  // namespace llmserve
