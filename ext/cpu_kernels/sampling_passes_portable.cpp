// Sampling passes for any machine: the compiler maps vectors to what is there.
#include <cstdint>
#include <cstring>
#include <limits>

#include "llmserve/sampling_passes.h"

namespace llmserve {
namespace {
#include "llmserve/sampling_passes_body.h"
}  // namespace

const SamplingPasses& sampling_passes_portable() {
  static const SamplingPasses passes{chunk_maxima, chunk_weights, count_above};
  return passes;
}

}  // namespace llmserve
