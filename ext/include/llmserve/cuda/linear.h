// Products of a few tokens' activations with matrices in their storage type, and rows of such
// matrices. llmserve/kernels/cuda/packing.py makes the layout that they have on the device, which
// linear_formats.h describes, from the bytes of a checkpoint.
#pragma once

#include <cstdint>

#include "llmserve/cuda/stream.h"

namespace llmserve::cuda {

// How a matrix is stored on the device: the numbers of ggml types, and from 100 on what checkpoints
// of other quantisation methods keep. F32, F16 and BF16 also name the types of vectors.
enum class Format : int64_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  BF16 = 30,
  INT4_ROW = 100,  // a scale and a zero point for each row, or for each 128 columns
  INT4_32 = 101,   // a scale and a zero point for each 32 columns
  INT8_ROW = 102,  // a scale for each row, or for each 128 columns
  FP8_ROW = 103,   // e4m3; scales as INT8_ROW
};

// A matrix among several that are multiplied with the same activations. Callers fill it as eight
// numbers of 64 bits. Planes that a format does not have are null. Floats have `low` alone, rows of
// num_cols elements one after the other, 16-byte aligned.
struct LinearPart {
  Format format;
  const uint8_t* low;
  const uint8_t* high;
  const uint8_t* scales;
  const uint8_t* super_scales;
  int64_t scales_per_chunk;  // of the ROW formats: 1, or 0 if a scale is a whole row's
  int64_t num_rows;
  const float* bias;  // num_rows values, or null
};
static_assert(sizeof(LinearPart) == 8 * sizeof(int64_t));

// out[t][r] = sum over c of x[t][c] * weight[r][c] + bias[r], where weight is the parts one below
// the other. x: [num_tokens, num_cols] of x_type, out: [num_tokens, rows of all parts] of x_type or
// F32, row after row; num_cols a multiple of 8, x 16-byte aligned. Any number of tokens; the time
// grows with each 16 of them. A token's result has the same bits in any company, and a row's too.
// Throws std::invalid_argument for a type that is not known.
void linear(const LinearPart* parts, int64_t num_parts, const void* x, Format x_type, void* out,
            Format out_type, int64_t num_tokens, int64_t num_cols, Stream stream);

// out[i] = row row_ids[i] of a quantised matrix, or row first_row + i where row_ids is null, as
// out_type [num_rows, num_cols]. A row id outside of the matrix gives a row of zeros.
void dequantize(const LinearPart& weight, const int64_t* row_ids, int64_t first_row, void* out,
                Format out_type, int64_t num_rows, int64_t num_cols, Stream stream);

}  // namespace llmserve::cuda
