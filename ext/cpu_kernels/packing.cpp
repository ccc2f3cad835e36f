// Rearranges matrices into packed tiles (packed_tiles.h, float_formats.h). Happens once, at start-up.
#include <algorithm>
#include <cstring>

#include "llmserve/linear.h"
#include "llmserve/parallel.h"
//
#include "llmserve/format_dispatch.h"
#include "llmserve/packed_tiles.h"

namespace llmserve {
namespace {

struct Isa {
  static LLMSERVE_INLINE U8x32 with_bits(U8x32 v, const uint8_t* bits, uint8_t value) {
    return llmserve::with_bits(v, bits, value);
  }
  static LLMSERVE_INLINE I32x8 widen_halves(U16x8 halves) {
    return __builtin_convertvector(halves, I32x8);
  }
};

LLMSERVE_INLINE void copy_half(const uint8_t* from, uint8_t* to) {
  store(to, load<uint16_t>(from));
}

// A chunk of the row that is lane `row` of its tile.
template <class Format>
void pack_chunk(const uint8_t* chunk, int num_groups, int row, uint8_t* out) {
  using Layout = Packed<Format>;
  constexpr int kHalf = static_cast<int>(sizeof(uint16_t));
  RowScales subs;
  SixBits six = {};
  if constexpr (Layout::kIsBlocked) {
    copy_half(chunk + Format::kScaleByte, out + row * kHalf);
    if constexpr (Format::kHasMin) {
      copy_half(chunk + Format::kMinByte, out + Layout::kHalves + row * kHalf);
    }
  }
  if constexpr (Format::kHasSubscales) Format::template subscales<Isa>(chunk, subs);
  if constexpr (Format::kScaleKind == ScaleKind::kSixBits) six = six_bits(chunk);
  for (int g = 0; g < num_groups; ++g) {
    uint8_t* group = out + Layout::kChunkHeader + g * Layout::kGroupBytes;
    if constexpr (Format::kScaleKind == ScaleKind::kHalves) {
      const uint8_t* block = chunk + g * Format::kBlockBytes;
      copy_half(block + Format::kScaleByte, group + row * kHalf);
      if constexpr (Format::kHasMin) {
        copy_half(block + Format::kMinByte, group + Layout::kHalves + row * kHalf);
      }
    } else if constexpr (Format::kScaleKind == ScaleKind::kSixBits) {
      group[row] = static_cast<uint8_t>(six.scales >> 8 * g);
      group[kPackedRows + row] = static_cast<uint8_t>(six.mins >> 8 * g);
    } else {
      for (int half = 0; half < 2; ++half) {
        const int high = Format::kHasMin ? subs.sub_min[half][g] << 4 : 0;
        group[half * kPackedRows + row] = static_cast<uint8_t>(subs.sub[half][g] | high);
      }
    }
    uint8_t quants[kGroup];
    store(quants, Format::template quants<Isa>(chunk, g));
    for (int q = 0; q < kQuads; ++q) {
      pack_quants<Format>(group + Layout::kGroupHeader, row, q, load<uint32_t>(quants + 4 * q));
    }
  }
}

struct Pack {
  const Matrix& weight;
  uint8_t* out;

  template <class Format>
  void quantized() const {
    const int64_t num_groups = weight.num_cols / kGroup;
    const int64_t row_bytes = num_groups / Format::kGroupsInBlock * Format::kBlockBytes;
    const int64_t tile_bytes = Packed<Format>::tile_bytes(weight.num_cols);
    parallel_for(divide_up(weight.num_rows, kPackedRows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        uint8_t* target = out + tile * tile_bytes;
        std::memset(target, 0, static_cast<size_t>(tile_bytes));
        const int64_t left = weight.num_rows - tile * kPackedRows;
        const int rows = static_cast<int>(left < kPackedRows ? left : kPackedRows);
        for (int64_t g = 0; g < num_groups; g += kGroupsInChunk) {
          const int64_t after = num_groups - g;
          const int groups = static_cast<int>(after < kGroupsInChunk ? after : kGroupsInChunk);
          for (int r = 0; r < rows; ++r) {
            const uint8_t* row = weight.data + (tile * kPackedRows + r) * row_bytes;
            pack_chunk<Format>(row + g / kGroupsInChunk * kChunkBytes<Format>, groups, r, target);
          }
          target += Packed<Format>::chunk_bytes(groups);
        }
      }
    });
  }

  template <class Format>
  void floating() const {
    const int64_t row_bytes = weight.num_cols * Format::kBytes;
    const int64_t tile_bytes = packed_floats_bytes<Format>(weight.num_cols);
    parallel_for(divide_up(weight.num_rows, kPackedRows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        uint8_t* target = out + tile * tile_bytes;
        std::memset(target, 0, static_cast<size_t>(tile_bytes));
        const int64_t rows = std::min<int64_t>(weight.num_rows - tile * kPackedRows, kPackedRows);
        const uint8_t* from = weight.data + tile * kPackedRows * row_bytes;
        for (int64_t c = 0; c < row_bytes; c += kWordBytes, target += kPackedWordBytes) {
          const auto bytes = static_cast<size_t>(std::min<int64_t>(row_bytes - c, kWordBytes));
          for (int64_t r = 0; r < rows; ++r) {
            std::memcpy(target + r * kWordBytes, from + r * row_bytes + c, bytes);
          }
        }
      }
    });
  }
};

struct PackedBytes {
  int64_t num_rows, num_cols;
  int64_t& result;

  template <class Format>
  void quantized() const {
    result = divide_up(num_rows, kPackedRows) * Packed<Format>::tile_bytes(num_cols);
  }
  template <class Format>
  void floating() const {
    result = divide_up(num_rows, kPackedRows) * packed_floats_bytes<Format>(num_cols);
  }
};

}  // namespace

int64_t packed_bytes(int type, int64_t num_rows, int64_t num_cols) {
  int64_t result = 0;
  dispatch(type, PackedBytes{num_rows, num_cols, result});
  return result;
}

void pack(const Matrix& weight, uint8_t* out) { dispatch(weight.type, Pack{weight, out}); }

}  // namespace llmserve
