// The passes over a row of logits that cost the time, compiled once per instruction set.
//
// A row is seen as chunks of kChunk logits, the last one padded with -inf. The maximum of each
// chunk is found first; later passes skip the chunks that lie below what they look for.
#pragma once

#include <cstdint>

namespace llmserve {

constexpr int64_t kChunk = 64;

struct SamplingPasses {
  // Maximum of each of num_chunks full chunks, NaN left out. Returns whether there was a NaN or a
  // +inf.
  bool (*chunk_maxima)(const float* logits, int64_t num_chunks, float* maxima);
  // weights[i] = exp((logits[i] - max) * inv_temperature) where logits[i] >= threshold, else 0, for
  // one full chunk. Zero below about 1e-38. Returns their sum.
  double (*chunk_weights)(const float* logits, float max, float inv_temperature, float threshold,
                          float* weights);
  // How many of one full chunk are above value.
  int64_t (*count_above)(const float* logits, float value);
};

const SamplingPasses& sampling_passes_portable();
#if defined(__x86_64__)
const SamplingPasses& sampling_passes_avx2();
#endif

}  // namespace llmserve
