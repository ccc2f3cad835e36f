// The kernels of linear.h over a struct `Isa` that the including file defines before.
//
// Isa gives: kTileRows, rows computed together, one for each lane of Isa::Floats and Isa::Ints, two
// lanes of Isa::Shorts and four of Isa::Bytes; kMaxTokens, tokens computed together;
// kHasFewTokenKernels, whether few tokens have kernels of their own, which take long to compile;
// from_half, widen_bytes, widen_halves (conversions); with_bits (ggml_formats.h); fma(a, b, c);
// transpose_quads(rows, quads), which makes vectors of four columns of all rows; add_pairs(sums,
// weights, activations), which adds the products of two int16 of each lane with two activations;
// row_dot(quants, activations), whose lanes add up to a group's sum for one row, the lower lanes for
// the first half; sum_halves, which adds those of eight rows.
//
// Whatever the number of tokens, each output is the same chain of float operations.
#pragma once

#include "llmserve/format_dispatch.h"
#include "llmserve/linear_float.h"
#include "llmserve/linear_quantized.h"

namespace llmserve {
namespace {

struct Multiply {
  const LinearArgs& args;
  int64_t begin, end;
  template <class Format>
  void quantized() const {
    multiply_quantized<Format>(args, begin, end);
  }
  template <class Format>
  void floating() const {
    multiply_float<Format>(args, begin, end);
  }
};

struct DequantizeRow {
  const Matrix& weight;
  int64_t row;
  float* out;
  template <class Format>
  void quantized() const {
    dequantize_quantized_row<Format>(weight, row, out);
  }
  template <class Format>
  void floating() const {
    dequantize_float_row<Format>(weight, row, out);
  }
};

inline void multiply(const LinearArgs& args, int64_t begin, int64_t end) {
  dispatch(args.weight.type, Multiply{args, begin, end});
}

inline void dequantize_row(const Matrix& weight, int64_t row, float* out) {
  dispatch(weight.type, DequantizeRow{weight, row, out});
}

}  // namespace
}  // namespace llmserve
