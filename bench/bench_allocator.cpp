// Allocate + free pairs per second of the block pool alone; bench_allocator.py compiles and runs it.
//
// "plain": blocks without a hash. "cached": every block gets a hash before it is freed, so every
// allocation evicts one. Each pair is one block; batches of 16 as a sequence's tables would be.
#include <chrono>
#include <cstdio>

#include "llmserve/block_pool.h"

namespace {

constexpr int32_t kNumBlocks = 16384;
constexpr int32_t kBatch = 16;

double pairs_per_second(bool is_cached, int64_t num_pairs) {
  llmserve::BlockPool pool(kNumBlocks);
  llmserve::BlockHash hash{};
  uint64_t state = 1;
  int32_t ids[kBatch];
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t done = 0; done < num_pairs; done += kBatch) {
    pool.allocate(kBatch, ids);
    for (int32_t i = kBatch; i-- > 0;) {
      if (is_cached) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::memcpy(hash.data(), &state, sizeof(state));
        pool.insert(hash, 0, ids[i]);
      }
      pool.release(ids[i]);
    }
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  pool.check_integrity();
  return static_cast<double>(num_pairs) / elapsed.count();
}

}  // namespace

int main() {
  pairs_per_second(false, 1 << 20);
  std::printf("{\"plain_pairs_per_s\": %.0f, \"cached_pairs_per_s\": %.0f}\n",
              pairs_per_second(false, 1 << 24), pairs_per_second(true, 1 << 22));
}
