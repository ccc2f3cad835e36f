// Body of the passes in sampling_passes.h. Included by one source file per instruction set, inside
// its own namespace and after the standard headers, hence without an include guard. Vectors are the
// compiler's own type: two halves where the machine's registers are shorter.

using Floats = float __attribute__((vector_size(32)));
using Halves = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));

constexpr int64_t kLanes = 8;

// Macros, for a function that returns a vector has an ABI that depends on the instruction set.
#define LLMSERVE_SPLAT(value) (Floats{} + (value))

bool chunk_maxima(const float* logits, int64_t num_chunks, float* maxima) {
  Ints is_nan{};
  for (int64_t c = 0; c < num_chunks; ++c) {
    const float* chunk = logits + c * kChunk;
    Floats best;
    std::memcpy(&best, chunk, sizeof(best));
    is_nan |= best != best;
    best = best == best ? best : LLMSERVE_SPLAT(-std::numeric_limits<float>::infinity());
    for (int64_t i = kLanes; i < kChunk; i += kLanes) {
      Floats x;
      std::memcpy(&x, chunk + i, sizeof(x));
      is_nan |= x != x;
      best = x > best ? x : best;
    }
    Halves halves[2];
    std::memcpy(halves, &best, sizeof(best));
    const Halves half = halves[0] > halves[1] ? halves[0] : halves[1];
    const float low = half[0] > half[2] ? half[0] : half[2];
    const float high = half[1] > half[3] ? half[1] : half[3];
    maxima[c] = low > high ? low : high;
  }
  int32_t any = 0;
  for (int64_t i = 0; i < kLanes; ++i) any |= is_nan[i];
  return any != 0;
}

// exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2; the Taylor series of exp(r) up to r^7 is good to
// 6e-9, less than a float's precision. ln(2) comes in two parts, the first of few digits, so that
// n * ln(2) is exact enough.
double chunk_weights(const float* logits, float max, float inv_temperature, float threshold,
                     float* weights) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693145751953125f;
  constexpr float kLn2Low = 1.42860682030941723e-6f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kSmallest = -87.0f;    // exp of less has no normal float
  Doubles sums[2] = {Doubles{}, Doubles{}};
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    Floats logit;
    std::memcpy(&logit, logits + i, sizeof(logit));
    const Floats x = (logit - max) * inv_temperature;
    const Floats shifted = x * kLog2e + kRound;
    const Floats n = shifted - kRound;
    const Floats r = (x - n * kLn2High) - n * kLn2Low;
    Floats power = LLMSERVE_SPLAT(1.0f / 5040);
    power = power * r + 1.0f / 720;
    power = power * r + 1.0f / 120;
    power = power * r + 1.0f / 24;
    power = power * r + 1.0f / 6;
    power = power * r + 0.5f;
    power = power * r + 1.0f;
    power = power * r + 1.0f;
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 23) + 0x3F800000;  // the low bits of `shifted` are n; now 2^n as a float
    Floats scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    const Ints is_kept = (logit >= threshold) & (x >= kSmallest);
    const Floats weight = is_kept ? power * scale : Floats{};
    std::memcpy(weights + i, &weight, sizeof(weight));
    Halves halves[2];
    std::memcpy(halves, &weight, sizeof(weight));
    sums[0] += __builtin_convertvector(halves[0], Doubles);
    sums[1] += __builtin_convertvector(halves[1], Doubles);
  }
  const Doubles sum = sums[0] + sums[1];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

int64_t count_above(const float* logits, float value) {
  Ints count{};
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    Floats x;
    std::memcpy(&x, logits + i, sizeof(x));
    count -= x > value;  // true is -1 in each lane
  }
  int64_t total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += count[i];
  return total;
}

#undef LLMSERVE_SPLAT
