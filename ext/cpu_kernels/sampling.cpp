// Rows of logits -> tokens and log-probabilities; see sampling.h for what is promised.
//
// No filter sorts the vocabulary. One pass finds the maximum of every chunk of 64 logits. The k-th
// largest of those maxima bounds the k-th largest logit from below, so top-k looks into about k
// chunks. min_p is a threshold. Top-p spreads the probability mass over narrow bins of the logit
// axis and sorts only the bin in which the mass reaches p.
#include "llmserve/sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "llmserve/instruction_set.h"
#include "llmserve/parallel.h"
#include "llmserve/sampling_passes.h"

namespace llmserve {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kNumBins = 1024;
constexpr int32_t kNoTieCut = std::numeric_limits<int32_t>::max();

const SamplingPasses& passes() {
#if defined(__x86_64__)
  if (get_instruction_set() >= InstructionSet::kAvx2) return sampling_passes_avx2();
#endif
  return sampling_passes_portable();
}

struct Candidate {
  float logit;
  float weight;
  int32_t token_id;
};

// The order of all rankings: best logit first, ties by lower id.
bool is_better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token_id < b.token_id);
}

struct Kept {
  float threshold;
  int32_t last_tie_id;
};

// The smallest float that is not below value.
float round_up(double value) {
  const float rounded = static_cast<float>(value);
  return rounded < value ? std::nextafter(rounded, kInfinity) : rounded;
}

// Bits of the mask for the kChunk tokens of chunk c.
uint64_t mask_word(const TokenMask& mask, int64_t c) {
  static_assert(kChunk == 64);
  uint64_t word = 0;
  const int64_t num_bytes = std::clamp<int64_t>(mask.num_bytes - 8 * c, 0, 8);
  std::memcpy(&word, mask.bits + 8 * c, static_cast<size_t>(num_bytes));
  return word;
}

using Words4 = uint32_t __attribute__((vector_size(16)));

// By vectors, because which tokens of a mixed run are allowed no processor can predict.
void mask_four(float* logits, uint32_t bits) {
  const Words4 is_set = (Words4{bits, bits, bits, bits} & Words4{1, 2, 4, 8}) != 0;
  constexpr uint32_t kBits = 0xff800000;  // of -inf
  Words4 words;
  std::memcpy(&words, logits, sizeof(words));
  words = (words & is_set) | (Words4{kBits, kBits, kBits, kBits} & ~is_set);
  std::memcpy(logits, &words, sizeof(words));
}

// One row at a time, with memory that serves all rows of a thread.
class Row {
 public:
  explicit Row(int64_t vocab_size)
      : vocab_size_(vocab_size),
        num_chunks_((vocab_size + kChunk - 1) / kChunk),
        passes_(passes()),
        maxima_((num_chunks_ + kChunk - 1) / kChunk * kChunk, -kInfinity),
        sums_(num_chunks_),
        mass_(2 * kNumBins) {}

  // Finds the row's maxima. The other methods need a row that is kOk.
  RowStatus load(const float* logits) {
    logits_ = logits;
    const int64_t num_full = vocab_size_ / kChunk;
    bool has_nan = passes_.chunk_maxima(logits, num_full, maxima_.data());
    if (num_full < num_chunks_) {
      std::fill_n(last_chunk_, kChunk, -kInfinity);
      std::copy(logits + num_full * kChunk, logits + vocab_size_, last_chunk_);
      has_nan |= passes_.chunk_maxima(last_chunk_, 1, &maxima_[num_full]);
    }
    return finish_loading(has_nan);
  }

  // The same with a mask. Grammars allow few tokens or nearly all: chunks of which no token is
  // allowed are not even read, here and later, for their maximum is -inf.
  RowStatus load(float* logits, const TokenMask& mask) {
    logits_ = logits;
    const int64_t num_full = vocab_size_ / kChunk;
    bool has_nan = false;
    for (int64_t c = 0; c < num_full; ++c) {
      const uint64_t word = mask_word(mask, c);
      maxima_[c] = -kInfinity;
      if (word == 0) continue;
      float* chunk = logits + c * kChunk;
      for (int64_t i = 0; ~word != 0 && i < kChunk; i += 4) {
        mask_four(chunk + i, static_cast<uint32_t>(word >> i));
      }
      has_nan |= passes_.chunk_maxima(chunk, 1, &maxima_[c]);
    }
    if (num_full < num_chunks_) {
      const uint64_t word = mask_word(mask, num_full);
      std::fill_n(last_chunk_, kChunk, -kInfinity);
      for (int64_t i = num_full * kChunk; i < vocab_size_; ++i) {
        if (!(word >> (i % kChunk) & 1)) logits[i] = -kInfinity;
        last_chunk_[i % kChunk] = logits[i];
      }
      has_nan |= passes_.chunk_maxima(last_chunk_, 1, &maxima_[num_full]);
    }
    return finish_loading(has_nan);
  }

  int32_t argmax() const {
    const auto best = std::find(maxima_.begin(), maxima_.end(), max_);
    const int64_t c = best - maxima_.begin();
    const float* chunk = this->chunk(c);
    return static_cast<int32_t>(c * kChunk + (std::find(chunk, chunk + kChunk, max_) - chunk));
  }

  SampledRow sample(const SamplingRow& params) {
    temperature_ = params.temperature;
    Kept kept{-kInfinity, kNoTieCut};
    if (params.min_p > 0) {
      kept.threshold = round_up(max_ + temperature_ * std::log(params.min_p));
    }
    if (params.top_k > 0 && params.top_k < vocab_size_) {
      kept.threshold = std::max(kept.threshold, kth_largest(params.top_k));
    }
    double total = sum_weights(kept);
    if (params.top_p < 1) {
      kept = nucleus(params.top_p, kept.threshold, total);
      total = sum_weights(kept);
    }
    const double target = uniform_at(params.seed, params.counter) * total;
    return {kept.threshold, kept.last_tie_id, draw(kept, target), RowStatus::kOk};
  }

  double log_sum_exp() {
    temperature_ = 1;
    return max_ + std::log(sum_weights({-kInfinity, kNoTieCut}));
  }

  void top(int64_t k, int32_t* token_ids, double* logits) {
    gather_at_least_k(k);
    std::partial_sort(candidates_.begin(), candidates_.begin() + k, candidates_.end(), is_better);
    for (int64_t i = 0; i < k; ++i) {
      token_ids[i] = candidates_[i].token_id;
      logits[i] = candidates_[i].logit;
    }
  }

  int32_t rank(int32_t token_id) const {
    const float logit = logits_[token_id];
    int64_t num_better = 0;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (maxima_[c] > logit) num_better += passes_.count_above(chunk(c), logit);
    }
    for (int64_t c = 0; c <= token_id / kChunk; ++c) {
      if (maxima_[c] < logit) continue;
      const int64_t end = std::min<int64_t>((c + 1) * kChunk, token_id);
      num_better += std::count(logits_ + c * kChunk, logits_ + end, logit);
    }
    return static_cast<int32_t>(num_better + 1);
  }

 private:
  RowStatus finish_loading(bool has_nan) {
    max_ = *std::max_element(maxima_.begin(), maxima_.end());
    if (has_nan || max_ == kInfinity) return RowStatus::kInvalid;
    return max_ == -kInfinity ? RowStatus::kEmpty : RowStatus::kOk;
  }

  // Whether no token of a chunk has a logit of at least `threshold`, or any weight.
  bool is_below(int64_t c, float threshold) const {
    return maxima_[c] < threshold || maxima_[c] == -kInfinity;
  }

  // kChunk logits; past the vocabulary they are -inf.
  const float* chunk(int64_t c) const {
    return (c + 1) * kChunk <= vocab_size_ ? logits_ + c * kChunk : last_chunk_;
  }

  float inv_temperature() const { return static_cast<float>(1 / temperature_); }

  int64_t chunk_end(int64_t c) const { return std::min((c + 1) * kChunk, vocab_size_); }

  // Weights of a chunk's kept tokens, relative to the row's maximum; returns their sum.
  double chunk_weights(int64_t c, const Kept& kept, float* weights) const {
    const float* logits = chunk(c);
    const int64_t num_ties_kept = kept.last_tie_id - c * kChunk + 1;
    if (num_ties_kept >= kChunk) {
      return passes_.chunk_weights(logits, max_, inv_temperature(), kept.threshold, weights);
    }
    float without_ties[kChunk];
    std::copy_n(logits, kChunk, without_ties);
    std::replace(without_ties + std::max<int64_t>(num_ties_kept, 0), without_ties + kChunk,
                 kept.threshold, -kInfinity);
    return passes_.chunk_weights(without_ties, max_, inv_temperature(), kept.threshold, weights);
  }

  // Fills sums_ and returns the total.
  double sum_weights(const Kept& kept) {
    float weights[kChunk];
    double total = 0;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      sums_[c] = is_below(c, kept.threshold) ? 0 : chunk_weights(c, kept, weights);
      total += sums_[c];
    }
    return total;
  }

  // The token at which the running sum of the kept weights, in id order, passes target. Needs
  // sums_ of the same tokens. Rounding may leave target at the very end: then the last token.
  int32_t draw(const Kept& kept, double target) const {
    double before = 0;
    int64_t c = 0;
    int64_t last_chunk = 0;
    for (; c < num_chunks_; ++c) {
      if (sums_[c] == 0) continue;
      last_chunk = c;
      if (before + sums_[c] > target) break;
      before += sums_[c];
    }
    if (c == num_chunks_) c = last_chunk;
    float weights[kChunk];
    chunk_weights(c, kept, weights);
    int64_t last = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      if (weights[i] == 0) continue;
      last = i;
      before += weights[i];
      if (before > target) break;
    }
    return static_cast<int32_t>(c * kChunk + last);
  }

  void gather(float threshold) {
    candidates_.clear();
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (is_below(c, threshold)) continue;
      for (int64_t i = c * kChunk; i < chunk_end(c); ++i) {
        if (logits_[i] >= threshold) {
          candidates_.push_back({logits_[i], 0, static_cast<int32_t>(i)});
        }
      }
    }
  }

  // The k best tokens and, as a rule, few others.
  void gather_at_least_k(int64_t k) {
    float bound = -kInfinity;
    if (k > 0 && k <= num_chunks_) {
      sorted_maxima_ = maxima_;
      std::nth_element(sorted_maxima_.begin(), sorted_maxima_.begin() + (k - 1),
                       sorted_maxima_.end(), std::greater<float>());
      bound = sorted_maxima_[k - 1];
    }
    gather(bound);
  }

  float kth_largest(int64_t k) {
    gather_at_least_k(k);
    // What is missing lies in chunks of -inf.
    if (static_cast<int64_t>(candidates_.size()) < k) return -kInfinity;
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(),
                     is_better);
    return candidates_[k - 1].logit;
  }

  // The shortest run of tokens, best first and ties by lower id, that holds top_p of the mass of
  // the tokens with a logit >= floor. `total` is that mass. (Holtzman et al., The Curious Case of
  // Neural Text Degeneration, 2019, arXiv 1904.09751.)
  Kept nucleus(double top_p, float floor, double total) {
    const double wanted = std::max(top_p * total, DBL_MIN);
    // Tokens further below the maximum than this hold less than 1 - top_p in all: were all of the
    // vocabulary there, it would be (1 - top_p) / e of the total.
    const double depth = std::log(static_cast<double>(vocab_size_) / ((1 - top_p) * total)) + 1;
    float bottom = std::max(floor, static_cast<float>(max_ - temperature_ * depth));
    bottom = raise_bottom(bottom, wanted);
    clear_bins();
    float weights[kChunk];
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (is_below(c, bottom)) continue;
      chunk_weights(c, {bottom, kNoTieCut}, weights);
      add_to_bins(chunk(c), weights, bottom);
    }
    double mass = 0;
    const int32_t bin = find_bin(wanted, &mass);
    gather_bin(bin, bottom);
    std::sort(candidates_.begin(), candidates_.end(), is_better);
    size_t num_kept = 0;
    while (num_kept < candidates_.size() && mass < wanted) mass += candidates_[num_kept++].weight;
    if (num_kept == 0) return {bottom, kNoTieCut};
    const Candidate& last = candidates_[num_kept - 1];
    return {last.logit, last.token_id};
  }

  // A higher logit above which there still is the wanted mass. The chunks' maxima are a sample of
  // the vocabulary that has nearly all of the best tokens: where they alone hold the mass, it is
  // enough to look as far down as they reach.
  float raise_bottom(float bottom, double wanted) {
    clear_bins();
    float weights[kChunk];
    for (size_t i = 0; i < maxima_.size(); i += kChunk) {
      passes_.chunk_weights(&maxima_[i], max_, inv_temperature(), bottom, weights);
      add_to_bins(&maxima_[i], weights, bottom);
    }
    double mass = 0;
    const int32_t bin = find_bin(wanted, &mass);
    if (mass + bin_mass(bin) < wanted) return bottom;
    // One bin more than needed, for rounding.
    return std::max(bottom, max_ - static_cast<float>(bin + 2) / bins_per_logit(bottom));
  }

  float bins_per_logit(float bottom) const {
    return bottom < max_ ? (kNumBins - 1) / (max_ - bottom) : 1;
  }

  // Bins of kChunk logits, from 0 at the maximum to kNumBins - 1 at bottom and below.
  void find_bins(const float* logits, float bottom, int32_t* bins) const {
    const float scale = bins_per_logit(bottom);
    for (int64_t i = 0; i < kChunk; ++i) {
      const float bin = (max_ - logits[i]) * scale;
      bins[i] = static_cast<int32_t>(bin < kNumBins - 1 ? bin : kNumBins - 1);
    }
  }

  void clear_bins() { std::fill(mass_.begin(), mass_.end(), 0.0); }

  // Two sums per bin, by turns: adding to one place over and over waits for the addition before.
  void add_to_bins(const float* logits, const float* weights, float bottom) {
    int32_t bins[kChunk];
    find_bins(logits, bottom, bins);
    for (int64_t i = 0; i < kChunk; i += 2) {
      mass_[bins[i]] += weights[i];
      mass_[kNumBins + bins[i + 1]] += weights[i + 1];
    }
  }

  double bin_mass(int32_t bin) const { return mass_[bin] + mass_[kNumBins + bin]; }

  // The bin in which the mass, summed from bin 0, reaches `wanted`; *before is the sum before it.
  int32_t find_bin(double wanted, double* before) const {
    int32_t bin = 0;
    while (bin < kNumBins - 1 && *before + bin_mass(bin) < wanted) *before += bin_mass(bin++);
    return bin;
  }

  void gather_bin(int32_t bin, float bottom) {
    float weights[kChunk];
    int32_t bins[kChunk];
    candidates_.clear();
    for (int64_t c = 0; c < num_chunks_; ++c) {
      if (is_below(c, bottom)) continue;
      find_bins(chunk(c), bottom, bins);
      int32_t num_found = 0;
      for (int64_t i = 0; i < kChunk; ++i) num_found += bins[i] == bin;
      if (num_found == 0) continue;
      chunk_weights(c, {bottom, kNoTieCut}, weights);
      for (int64_t i = c * kChunk; i < chunk_end(c); ++i) {
        if (bins[i - c * kChunk] != bin || logits_[i] < bottom) continue;
        candidates_.push_back({logits_[i], weights[i - c * kChunk], static_cast<int32_t>(i)});
      }
    }
  }

  const int64_t vocab_size_;
  const int64_t num_chunks_;
  const SamplingPasses& passes_;
  const float* logits_ = nullptr;
  float max_ = 0;
  double temperature_ = 1;
  float last_chunk_[kChunk];
  std::vector<float> maxima_;  // of each chunk, then -inf up to a full chunk of them
  std::vector<float> sorted_maxima_;
  std::vector<double> sums_;
  std::vector<double> mass_;
  std::vector<Candidate> candidates_;
};

}  // namespace

PhiloxBlock philox4x32(PhiloxBlock counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

double uniform_at(uint64_t seed, uint64_t counter) {
  const PhiloxBlock block =
      philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{block[1]} << 32 | block[0]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

void sample_rows(float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                 const SamplingRow* params, const TokenMask* masks, SampledRow* out) {
  parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
    Row row(vocab_size);
    for (int64_t r = begin; r < end; ++r) {
      float* x = logits + r * row_stride;
      const bool is_masked = masks != nullptr && masks[r].bits != nullptr;
      const RowStatus status = is_masked ? row.load(x, masks[r]) : row.load(x);
      if (status != RowStatus::kOk) {
        out[r] = {0, 0, 0, status};
      } else if (params[r].temperature > 0) {
        out[r] = row.sample(params[r]);
      } else {
        const int32_t token_id = row.argmax();
        out[r] = {x[token_id], token_id, token_id, status};
      }
    }
  });
}

void logprob_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                  const int32_t* row_ids, const int32_t* token_ids, int64_t top_k, double* logprobs,
                  int32_t* ranks, int32_t* top_ids, double* top_logprobs) {
  parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
    Row row(vocab_size);
    for (int64_t r = begin; r < end; ++r) {
      const float* x = logits + row_ids[r] * row_stride;
      int32_t* best_ids = top_ids + r * top_k;
      double* best = top_logprobs + r * top_k;
      if (row.load(x) != RowStatus::kOk) {
        logprobs[r] = std::numeric_limits<double>::quiet_NaN();
        ranks[r] = token_ids[r] + 1;
        for (int64_t i = 0; i < top_k; ++i) best_ids[i] = static_cast<int32_t>(i);
        std::fill_n(best, top_k, std::numeric_limits<double>::quiet_NaN());
        continue;
      }
      const double norm = row.log_sum_exp();
      logprobs[r] = x[token_ids[r]] - norm;
      ranks[r] = row.rank(token_ids[r]);
      if (top_k == 0) continue;
      row.top(top_k, best_ids, best);
      for (int64_t i = 0; i < top_k; ++i) best[i] -= norm;
    }
  });
}

}  // namespace llmserve
