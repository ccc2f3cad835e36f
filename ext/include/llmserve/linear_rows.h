// What products with quantised and with float weights have in common: which rows and which tokens
// are computed together, and where results go.
#pragma once

#include <type_traits>

#include "llmserve/linear_tile.h"

namespace llmserve {
namespace {

constexpr int kTokenBlock = 128;    // tokens for which an unpacked tile is used
constexpr int kPrefetchRows = 32;  // how far ahead rows are fetched into the second-level cache
// The same in packed tiles. Fetched a group at a time: where the core asks for a whole chunk at once,
// it waits for it, and then the memory waits for the products.
constexpr int kPrefetchBytes = 6144;

using V = Isa::Floats;
constexpr int kTileRows = Isa::kTileRows;

// Calls f with as many tokens at once as there are left, as a constant: 8, 4, 2 or 1.
template <int kTokens, typename F>
LLMSERVE_INLINE void for_token_groups(int num_tokens, F f, int first = 0) {
  while (num_tokens - first >= kTokens) {
    f(std::integral_constant<int, kTokens>{}, first);
    first += kTokens;
  }
  if constexpr (kTokens > 1) for_token_groups<kTokens / 2>(num_tokens, f, first);
}

// At the end of the matrix its last row stands in for those that are missing.
template <int kRows>
LLMSERVE_INLINE void find_rows(const Matrix& weight, int64_t row_bytes, int64_t first,
                               const uint8_t* rows[kRows]) {
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r;
    rows[r] = weight.data + (row < weight.num_rows ? row : weight.num_rows - 1) * row_bytes;
  }
}

template <int kRows, typename Floats>
LLMSERVE_INLINE void store_rows(const LinearArgs& args, int64_t row, int64_t first_token,
                                int num_tokens, const float (*total)[kRows]) {
  const int64_t num_rows = args.weight.num_rows;
  for (int t = 0; t < num_tokens; ++t) {
    float* out = args.out + (first_token + t) * args.out_stride + row;
    if (row + kRows <= num_rows) {
      const auto sums = load<Floats>(total[t]);
      store(out, args.bias ? sums + load<Floats>(args.bias + row) : sums);
      continue;
    }
    for (int64_t r = 0; r < num_rows - row; ++r) {
      out[r] = args.bias ? total[t][r] + args.bias[row + r] : total[t][r];
    }
  }
}

LLMSERVE_INLINE void prefetch_range(const uint8_t* begin, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(begin + i, 0, 2);
}

// What comes kPrefetchBytes behind `begin`, unless it is behind `end`: another thread's.
LLMSERVE_INLINE void prefetch_ahead(const uint8_t* begin, int num_bytes, const uint8_t* end) {
  if (begin + kPrefetchBytes < end) prefetch_range(begin + kPrefetchBytes, num_bytes);
}

}  // namespace
}  // namespace llmserve
