// The storage types of floats, a struct each. A word is 4 bytes: a column of float32, or two
// neighbours of 16 bits.
#pragma once

#include "llmserve/linear.h"
#include "llmserve/simd.h"

namespace llmserve {
namespace {

// split<Isa>(words, columns) makes the columns of a word, for eight rows.
struct Float32 {
  static constexpr int kBytes = 4;
  template <class Isa>
  static LLMSERVE_INLINE void split(I32x8 words, F32x8* columns) {
    columns[0] = (F32x8)words;
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  template <class Isa>
  static LLMSERVE_INLINE void split(I32x8 words, F32x8* columns) {
    columns[0] = Isa::from_half(__builtin_convertvector(words & 0xffff, U16x8));
    columns[1] = Isa::from_half(__builtin_convertvector((U32x8)words >> 16, U16x8));
  }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  template <class Isa>
  static LLMSERVE_INLINE void split(I32x8 words, F32x8* columns) {
    columns[0] = (F32x8)(words << 16);
    columns[1] = (F32x8)((U32x8)words & 0xffff0000u);
  }
};

constexpr int kWordBytes = 4;
constexpr int kRowBlock = 32;                               // bytes of a row that are read together
constexpr int kPackedWordBytes = kPackedRows * kWordBytes;  // a word of each row of a packed tile

template <class Format>
constexpr int kColumnsInWord = kWordBytes / Format::kBytes;

// Packed, rows of floats are tiles as well: word after word, 16 rows side by side. Zeros fill rows
// up to a multiple of kRowBlock, and stand for rows that the matrix lacks.
template <class Format>
constexpr int64_t packed_floats_bytes(int64_t num_cols) {
  return (num_cols * Format::kBytes + kRowBlock - 1) / kRowBlock * kRowBlock * kPackedRows;
}

template <class Format>
LLMSERVE_INLINE const uint8_t* packed_floats(const Matrix& weight, int64_t row) {
  return weight.data + row / kPackedRows * packed_floats_bytes<Format>(weight.num_cols) +
         row % kPackedRows * kWordBytes;
}

}  // namespace
}  // namespace llmserve
