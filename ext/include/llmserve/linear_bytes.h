// Products of packed weights with activations of 8 bits, for an Isa that multiplies bytes: it has
// add_quads(sums, weights, activations), which adds the products of four bytes of each lane with four
// activations. Included after linear_body.h.
#pragma once

#include "llmserve/linear_body.h"

namespace llmserve {
namespace {

inline void quantize_bytes(const float* x, int64_t num_cols, int64_t num_tokens, int64_t begin,
                           int64_t end, ByteChunk* chunks) {
  ActivationChunk words;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < num_cols; c += kGroup) {
      ByteChunk& chunk = chunks[c / kChunk * num_tokens + t];
      const int g = static_cast<int>(c % kChunk / kGroup);
      quantize_group(x + t * num_cols + c, kMaxByteQuant, words, g);
      for (int i = 0; i < kGroup / 2; ++i) {
        chunk.quants[g][2 * i] = static_cast<int8_t>(words.quants[g][i]);
        chunk.quants[g][2 * i + 1] = static_cast<int8_t>(words.quants[g][kGroup / 2 + i]);
      }
      chunk.scale[g] = words.scale[g];
      chunk.scaled_sum[g] = words.scaled_sum[g];
      for (int half = 0; half < 2; ++half) chunk.sums[g][half] = words.sums[g][half];
    }
  }
}

// Adds a group to the totals of kTokens tokens: the same integers as add_tile_group has, with the
// offset taken off before the products and the subscales multiplied after them.
template <class Format, int kTokens>
LLMSERVE_INLINE void add_byte_group(const TileScales<kTileRows>& scales, int g,
                                    const uint8_t* planes, int lane, const ByteChunk* chunks,
                                    V total[kTokens]) {
  constexpr int kHalves = Format::kHasSubscales ? 2 : 1;
  Isa::Ints sums[kTokens][kHalves];
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    Isa::Ints dots[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      const int32_t* x_sums = chunks[t].sums[g];
      const int32_t x_sum = kHalves == 2 ? x_sums[half] : x_sums[0] + x_sums[1];
      dots[t] = splat<Isa::Ints>(-Format::kOffset * x_sum);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQuads / kHalves; ++i) {
      const int q = half * (kQuads / kHalves) + i;
      const auto quad = packed_quad<Format, Isa>(planes, q, lane);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        dots[t] = Isa::add_quads(dots[t], quad, load<int32_t>(chunks[t].quants[g] + 4 * q));
      }
    }
    for (int t = 0; t < kTokens; ++t) {
      if constexpr (Format::kHasSubscales) dots[t] *= load<Isa::Ints>(scales.sub[g][half]);
      sums[t][half] = dots[t];
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    total[t] = add_group<Format>(scales, g, chunks[t], sums[t], total[t]);
  }
}

// One tile of rows for kTokens tokens from `first` on.
template <class Format, int kTokens>
LLMSERVE_INLINE void multiply_byte_tile(const LinearArgs& args, int64_t row, int64_t first,
                                        const uint8_t* last) {
  using Layout = Packed<Format>;
  const int64_t num_all_groups = args.weight.num_cols / kGroup;
  const int lane = static_cast<int>(row % kPackedRows);
  const uint8_t* chunk = packed_tile<Format>(args.weight, row);
  const ByteChunk* chunks = args.byte_chunks + first;
  TileScales<kTileRows> scales;
  V total[kTokens] = {};
  for (int64_t g = 0; g < num_all_groups; g += kGroupsInChunk) {
    const int num_groups = groups_left(num_all_groups, g);
    const int64_t num_bytes = Layout::chunk_bytes(num_groups);
    unpack_packed_scales<Format, Isa>(chunk, num_groups, lane, scales);
    for (int i = 0; i < num_groups; ++i) {
      const uint8_t* planes =
          chunk + Layout::kChunkHeader + i * Layout::kGroupBytes + Layout::kGroupHeader;
      if (first == 0) prefetch_ahead(planes, Layout::kGroupBytes, last);
      add_byte_group<Format, kTokens>(scales, i, planes, lane, chunks, total);
    }
    chunk += num_bytes;
    chunks += args.num_tokens;
  }
  alignas(64) float sums[kTokens][kTileRows];
  for (int t = 0; t < kTokens; ++t) store(sums[t], total[t]);
  store_rows<kTileRows, V>(args, row, first, kTokens, sums);
}

struct MultiplyBytes {
  const LinearArgs& args;
  int64_t begin, end;

  template <class Format>
  void quantized() const {
    prefetch_range(packed_tile<Format>(args.weight, begin), kPrefetchBytes);
    const uint8_t* const last = packed_tile<Format>(args.weight, end + kPackedRows - 1);
    for (int64_t row = begin; row < end; row += kTileRows) {
      for_token_groups<8>(static_cast<int>(args.num_tokens), [&](auto tokens, int first) {
        multiply_byte_tile<Format, decltype(tokens)::value>(args, row, first, last);
      });
    }
  }
  template <class Format>
  void floating() const {}
};

inline void multiply_bytes(const LinearArgs& args, int64_t begin, int64_t end) {
  dispatch(args.weight.type, MultiplyBytes{args, begin, end});
}

}  // namespace
}  // namespace llmserve
