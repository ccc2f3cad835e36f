// Products of float32 activations with matrices in their GGUF storage type, and rows of such
// matrices as float32. Which instructions compute them is chosen at run time.
#pragma once

#include <cstdint>

namespace llmserve {

// Added to the number of a type: the matrix is packed, as pack() makes it.
constexpr int kPacked = 0x100;
// Added to the types of all parts of a product: activations are quantised to 8 bits, not to 16.
constexpr int kByteActivations = 0x200;
constexpr int kTypeMask = 0xff;
constexpr int kPackedRows = 16;  // of a tile

struct Matrix {
  // num_rows rows of row_bytes(type, num_cols), at any alignment; or packed tiles, aligned to 64.
  const uint8_t* data;
  int type;  // number of the ggml type
  int64_t num_rows;
  int64_t num_cols;  // a multiple of the type's block length
};

// A matrix among several that are multiplied with the same activations. Callers fill it as five
// numbers of 64 bits.
struct LinearPart {
  const uint8_t* data;
  int64_t type;
  int64_t num_rows;
  int64_t num_cols;
  const float* bias;  // num_rows values, or null
};
static_assert(sizeof(LinearPart) == 5 * sizeof(int64_t));

// out[t][r] = sum over c of x[t][c] * weight[r][c] + bias[r], where weight is the parts one below
// the other. x: [num_tokens, num_cols], out: [num_tokens, rows of all parts], both row after row.
// Raises std::invalid_argument for a type that is not known, as the two below.
void linear(const float* x, const LinearPart* parts, int64_t num_parts, float* out,
            int64_t num_tokens);

// out[i] = scale * row row_ids[i] of the matrix. Raises std::out_of_range for an id outside of it.
void embedding(const int64_t* row_ids, const Matrix& weight, float scale, float* out,
               int64_t num_ids);

// Bytes of a matrix once it is packed.
int64_t packed_bytes(int type, int64_t num_rows, int64_t num_cols);

// Rearranges a matrix as packed_tiles.h and float_formats.h describe. The kernels then read one
// stream, and need not transpose what they read.
void pack(const Matrix& weight, uint8_t* out);

// out: [num_rows, num_cols].
void dequantize(const Matrix& weight, float* out);

// A run of 8 groups of 32 columns of one token, quantised to 16 bits: x ~ scale[g] * quants[g][i].
// 8 bits are not enough: the largest activations of a model hide the others of their group, which
// leaves logits of Gemma 3 270M at a cosine of 0.88 in the worst position; 11 bits give 0.9995.
struct ActivationChunk {
  // The even columns of a group, then the odd ones, in [-32767, 32767]. A pair of
  // neighbours meets the even or the odd bytes of four columns of weights.
  alignas(64) int16_t quants[8][32];
  float scale[8];
  float scaled_sum[8];  // sum of the group's values
  int32_t sums[8][2];   // sums of the quants of the halves of a group
};

// Steps of quantised activations: with more, the sum of a group could exceed 32 bits.
constexpr float kMaxQuant = 32767.0f;
constexpr float kMaxByteQuant = 127.0f;

// The same in 8 bits, in the order of the columns, for products of bytes.
struct ByteChunk {
  alignas(64) int8_t quants[8][32];
  float scale[8];
  float scaled_sum[8];
  int32_t sums[8][2];
};

// Tokens for which activations are quantised: kernels for few tokens come for some counts only, and
// the next larger one computes zeros as well.
constexpr int64_t padded_tokens(int64_t num_tokens) {
  return num_tokens > 2 && num_tokens < 8 ? (num_tokens + 1) / 2 * 2 : num_tokens;
}

struct LinearArgs {
  const float* x;
  // [num_chunks][padded_tokens(num_tokens)], if the weight's type is quantised
  const ActivationChunk* chunks;
  const ByteChunk* byte_chunks;  // [num_chunks][num_tokens], for ByteKernels
  const uint16_t* x_bfloat16;     // [num_tokens][bfloat16_stride(num_cols)], for BFloat16Kernels
  Matrix weight;
  const float* bias;
  float* out;
  int64_t out_stride;  // from the row of a token to that of the next
  int64_t num_tokens;
};

// What each instruction set provides.
struct LinearKernels {
  int tile_rows;  // rows of the weight that are computed together
  // Quantises tokens [begin, end) of x [.., num_cols] to [-max_quant, max_quant];
  // chunks: [num_chunks][chunk_tokens].
  void (*quantize)(const float* x, int64_t num_cols, float max_quant, int64_t chunk_tokens,
                   int64_t begin, int64_t end, ActivationChunk* chunks);
  // Computes all tokens for rows [begin, end) of the weight; begin is a multiple of tile_rows.
  void (*multiply)(const LinearArgs& args, int64_t begin, int64_t end);
  void (*dequantize_row)(const Matrix& weight, int64_t row, float* out);
};

// What an instruction set with products of bytes provides beside them, for packed weights. Outputs
// have the bits that LinearKernels give from activations of 8 bits.
struct ByteKernels {
  void (*quantize)(const float* x, int64_t num_cols, int64_t num_tokens, int64_t begin, int64_t end,
                   ByteChunk* chunks);
  // As LinearKernels::multiply.
  void (*multiply)(const LinearArgs& args, int64_t begin, int64_t end);
};

// What an instruction set with products of bfloat16 provides beside them, for such weights.
struct BFloat16Kernels {
  // Rounds tokens [begin, end) of x [num_tokens, num_cols]; the columns that fill up a row of
  // `out` become 0.
  void (*round)(const float* x, int64_t num_cols, int64_t begin, int64_t end, uint16_t* out);
  // As LinearKernels::multiply.
  void (*multiply)(const LinearArgs& args, int64_t begin, int64_t end);
};

// Columns of a row of activations in bfloat16.
constexpr int64_t bfloat16_stride(int64_t num_cols) { return (num_cols + 15) / 16 * 16; }

extern const LinearKernels kLinearPortable;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512Vnni;
extern const ByteKernels kBytesAvx512Vnni;
extern const BFloat16Kernels kBFloat16Avx512;  // tiles as those of kLinearAvx512Vnni
#endif

}  // namespace llmserve
