// Element types of the KV cache, as their bits.
#pragma once

#include <cstdint>

namespace llmserve {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

enum class CacheType { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

}  // namespace llmserve
