// The kernels of linear.h over a struct `Isa` that the including file defines before.
//
// Isa gives: kTileRows, rows computed together, one for each lane of Isa::Floats and Isa::Ints and
// two lanes of Isa::Shorts; kMaxTokens, tokens computed together; from_half, widen_bytes,
// widen_halves (conversions); with_fifth_bits (ggml_formats.h); fma(a, b, c); transpose_quads(rows,
// quads), which makes vectors of four columns of all rows; group_dots<kHalves, kTokens>(quants,
// chunks, g, sums), the exact sums over a group of a tile, or over its halves;
// row_dot(quants, activations), whose lanes add up to a group's sum for one row, the lower lanes for
// the first half; sum_halves, which adds those of eight rows.
//
// Whatever the number of tokens, each output is the same chain of float operations.
#pragma once

#include "llmserve/linear_float.h"
#include "llmserve/linear_quantized.h"

namespace llmserve {
namespace {

// Calls f.quantized<Format>() or f.floating<Format>() for the number of a ggml type.
template <typename F>
LLMSERVE_INLINE void dispatch(int type, F f) {
  switch (type) {
    case 0:
      return f.template floating<Float32>();
    case 1:
      return f.template floating<Float16>();
    case 30:
      return f.template floating<BFloat16>();
    case 2:
      return f.template quantized<Q4_0>();
    case 3:
      return f.template quantized<Q4_1>();
    case 6:
      return f.template quantized<Q5_0>();
    case 7:
      return f.template quantized<Q5_1>();
    case 8:
      return f.template quantized<Q8_0>();
    case 10:
      return f.template quantized<Q2_K>();
    case 11:
      return f.template quantized<Q3_K>();
    case 12:
      return f.template quantized<Q4_K>();
    case 13:
      return f.template quantized<Q5_K>();
    case 14:
      return f.template quantized<Q6_K>();
  }
}

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
  const uint8_t* row;
  int64_t num_cols;
  float* out;
  template <class Format>
  void quantized() const {
    dequantize_quantized_row<Format>(row, num_cols, out);
  }
  template <class Format>
  void floating() const {
    dequantize_float_row<Format>(row, num_cols, out);
  }
};

inline void multiply(const LinearArgs& args, int64_t begin, int64_t end) {
  dispatch(args.weight.type, Multiply{args, begin, end});
}

inline void dequantize_row(const uint8_t* row, int type, int64_t num_cols, float* out) {
  dispatch(type, DequantizeRow{row, num_cols, out});
}

}  // namespace
}  // namespace llmserve
