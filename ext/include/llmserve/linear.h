// Products of float32 activations with matrices in their GGUF storage type, and rows of such
// matrices as float32. Which instructions compute them is chosen at run time.
#pragma once

#include <cstdint>

namespace llmserve {

struct Matrix {
  const uint8_t* data;  // num_rows rows of row_bytes(type, num_cols), at any alignment
  int type;             // number of the ggml type
  int64_t num_rows;
  int64_t num_cols;  // a multiple of the type's block length
};

// out[t][r] = sum over c of x[t][c] * weight[r][c], + bias[r] if bias is not null.
// x: [num_tokens, num_cols], out: [num_tokens, num_rows], both row after row.
// Raises std::invalid_argument for a type that is not known, as the two below.
void linear(const float* x, const Matrix& weight, const float* bias, float* out,
            int64_t num_tokens);

// out[i] = row row_ids[i] of the matrix. Raises std::out_of_range for an id outside of it.
void embedding(const int64_t* row_ids, const Matrix& weight, float* out, int64_t num_ids);

// out: [num_rows, num_cols].
void dequantize(const Matrix& weight, float* out);

// A run of 8 groups of 32 columns of one token, quantised to 16 bits as two planes of 8:
// x ~ scale[0][g] * quants[0][g][i] + scale[1][g] * quants[1][g][i], scale[1] = scale[0] / 254.
// One plane alone is not enough: the largest activations of a model hide the others of their group
// (8 bits leave logits of Gemma 3 270M at a cosine of 0.91 in the worst position, 12 bits 0.9999).
constexpr int kPlanes = 2;

struct ActivationChunk {
  alignas(32) int8_t quants[kPlanes][8][32];  // in [-127, 127]
  // 254 * quants[0] + quants[1]; columns 0-7, 16-23, 8-15, 24-31 of the group.
  alignas(32) int16_t wide[8][32];
  alignas(32) float scale[kPlanes][8];
  int32_t wide_sum[8];           // sum of the group in `wide`
  float scaled_sum[8];           // sum of the group's values
  int16_t sums[kPlanes][8][2];   // sums of the quants of the halves of a group
};

struct LinearArgs {
  const float* x;
  const ActivationChunk* chunks;  // [num_chunks][num_tokens], if the weight's type is quantised
  Matrix weight;
  const float* bias;
  float* out;
  int64_t num_tokens;
};

constexpr int kTileRows = 8;  // rows of the weight that are computed together

// What each instruction set provides.
struct LinearKernels {
  // Quantises tokens [begin, end) of x [num_tokens, num_cols].
  void (*quantize)(const float* x, int64_t num_cols, int64_t num_tokens, int64_t begin, int64_t end,
                   ActivationChunk* chunks);
  // Computes all tokens for tiles [begin, end) of weight rows.
  void (*multiply)(const LinearArgs& args, int64_t begin, int64_t end);
  void (*dequantize_row)(const uint8_t* row, int type, int64_t num_cols, float* out);
};

extern const LinearKernels kLinearPortable;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512Vnni;
#endif

}  // namespace llmserve
