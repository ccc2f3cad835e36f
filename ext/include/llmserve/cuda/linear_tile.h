// Products for a few tokens on tensor cores: memory-bound, whatever the format.
//
// A block owns 16 rows of the weight and up to 8 * kTiles tokens. Its eight warps take the chunks
// of the rows in turn, so each warp streams 16 rows with several loads in flight, and at the end
// the block adds the eight partial sums in the order of the warps. Weights are the A operand as
// they are (floats) or as exact small integers; the scale of a group meets the float32 sum of its
// products, and a product with ones gives the sum of the activations for minima and offsets.
//
// Which columns a lane holds is free, as A and B agree: lane t of a row takes 8 neighbours, 16
// bytes of activations. Columns of a tensor-core product do not mix, so a token's bits do not
// depend on its company; those of a row depend on the number of columns alone.
#pragma once

#include "llmserve/cuda/linear_formats.h"

namespace llmserve::cuda {

constexpr int kMaxParts = 4;
constexpr int kTileRows = 16;
constexpr int kTileTokens = 8;
constexpr int kTileWarps = 8;
constexpr int kTileThreads = kTileWarps * kWarpSize;

// Blocks that fit a multiprocessor at once, which leaves 80 or 128 registers. Where there are many
// words to a stage, two blocks have enough bytes in flight.
template <class F, int kTiles>
constexpr int kTileBlocks = kTiles > 1 || (F::kHighBits > 0 && F::kScaleWords > 2) ? 2 : 3;

// Stages that are loaded ahead; with more tokens, arithmetic takes the registers.
template <int kTiles>
constexpr int kTileDepth = kTiles > 1 ? 1 : 2;

struct LinearArgs {
  KernelPart parts[kMaxParts];
  int num_parts;
  const void* x;
  void* out;
  Format out_type;
  int64_t num_tokens;
  int64_t num_cols;
  int64_t out_stride;
};

template <typename T>
LLMSERVE_DEVICE void store_as(void* out, int64_t index, float value) {
  static_cast<T*>(out)[index] = from_float<T>(value);
}

LLMSERVE_DEVICE void store_value(void* out, Format type, int64_t index, float value) {
  if (type == Format::F32) {
    store_as<float>(out, index, value);
  } else if (type == Format::F16) {
    store_as<half>(out, index, value);
  } else {
    store_as<bfloat16>(out, index, value);
  }
}

// The part that a tile belongs to.
LLMSERVE_DEVICE const KernelPart& part_of_tile(const LinearArgs& args, int64_t tile) {
  int index = 0;
#pragma unroll
  for (int i = 1; i < kMaxParts; ++i) {
    if (i < args.num_parts && tile >= args.parts[i].first_tile) index = i;
  }
  return args.parts[index];
}

// Keeps the stages of chunks begin, begin + step, ... ahead of their use, kDepth at a time.
template <class Stage, int kDepth, class Load, class Use>
LLMSERVE_DEVICE void stream_chunks(int begin, int end, int step, Load load, Use use) {
  Stage stages[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    if (begin + i * step < end) load(begin + i * step, stages[i]);
  }
  for (int first = begin; first < end; first += kDepth * step) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int chunk = first + i * step;
      if (chunk < end) {
        use(chunk, stages[i]);
        if (chunk + kDepth * step < end) load(chunk + kDepth * step, stages[i]);
      }
    }
  }
}

// Where this lane's activations lie: those of one token of each tile of 8.
template <typename T, int kTiles>
struct TokenColumns {
  const T* rows[kTiles];  // null beyond the last token
  int num_cols;

  LLMSERVE_DEVICE TokenColumns(const LinearArgs& args, int64_t first_token)
      : num_cols(static_cast<int>(args.num_cols)) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int64_t token = first_token + i * kTileTokens + lane_id() / 4;
      const bool is_there = token < args.num_tokens;
      rows[i] = is_there ? static_cast<const T*>(args.x) + token * num_cols : nullptr;
    }
  }

  // 8 neighbours: the B operands of two products.
  LLMSERVE_DEVICE void load8(int tile, int column, uint32_t (&words)[4]) const {
    Vec16 v = {};
    if (rows[tile] != nullptr && column < num_cols) v = load16(rows[tile] + column);
    set_words(v, words);
  }

  // 4 neighbours of each half of a group.
  LLMSERVE_DEVICE void load_halves(int tile, int group, int t, uint32_t (&words)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = group + 16 * h + 4 * t;
      uint32_t two[2] = {0, 0};
      if (rows[tile] != nullptr && column < num_cols) {
        load_words(reinterpret_cast<const uint8_t*>(rows[tile] + column), two);
      }
      words[2 * h] = two[0];
      words[2 * h + 1] = two[1];
    }
  }
};

// d += the product over one half of a group; a0 and a1 hold the pairs of the lane's two rows.
template <typename T>
LLMSERVE_DEVICE void multiply_half(float (&d)[4], const uint32_t (&a0)[4], const uint32_t (&a1)[4],
                                   const uint32_t (&x)[4], int h) {
  const uint32_t a[4] = {a0[2 * h], a1[2 * h], a0[2 * h + 1], a1[2 * h + 1]};
  const uint32_t b[2] = {x[2 * h], x[2 * h + 1]};
  mma_16816<T>(d, a, b);
}

// Adds the eight warps' sums and writes the tile. sums: lane (g, t) of a warp has rows g and g + 8
// of tokens 2t and 2t + 1 of each tile.
template <int kTiles>
LLMSERVE_DEVICE void finish_tile(const LinearArgs& args, const KernelPart& part, int64_t first_row,
                                 int64_t first_token, const float (&sums)[kTiles][4]) {
  constexpr int kTokens = kTiles * kTileTokens;
  constexpr int kOutputs = kTokens * kTileRows;
  LLMSERVE_SHARED(float, partial, kTileWarps * kOutputs);
  const int g = lane_id() / 4;
  const int t = lane_id() % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * kTileTokens + 2 * t + i % 2;
      const int row = g + i / 2 * 8;
      partial[warp_id() * kOutputs + token * kTileRows + row] = sums[tile][i];
    }
  }
  block_sync();
  const int output = static_cast<int>(threadIdx.x);
  const int64_t row = first_row + output % kTileRows;
  const int64_t token = first_token + output / kTileRows;
  if (output >= kOutputs || row >= part.num_rows || token >= args.num_tokens) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kTileWarps; ++warp) sum += partial[warp * kOutputs + output];
  if (part.bias != nullptr) sum += part.bias[row];
  store_value(args.out, args.out_type, token * args.out_stride + part.out_column + row, sum);
}

template <class F>
struct RawPair {  // rows g and g + 8 of a tile
  Raw<F> rows[2];
};

// Adds a chunk's products to `sums`.
template <class F, typename T, int kTiles>
LLMSERVE_DEVICE void add_chunk(const RawPair<F>& raw, int chunk,
                               const TokenColumns<T, kTiles>& columns, float (&sums)[kTiles][4]) {
  constexpr int kOperands = F::template kOperands<T>;
  constexpr int kParts = F::kHalves ? 2 : 1;  // of a group that have scales of their own
  const uint32_t one = power_pair<T>(0);
  const uint32_t ones[4] = {one, one, one, one};
  const int t = lane_id() % 4;
  float products[kTiles][4];  // since the last scale
  float totals[kTiles][4];    // of the activations, the same in all rows
#pragma unroll
  for (int w = 0; w < F::kGroups; ++w) {
    uint32_t a[2][kOperands][4];
    Affine affine[2][kParts];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      F::template operands<T>(raw.rows[r], w, a[r]);
#pragma unroll
      for (int h = 0; h < kParts; ++h) affine[r][h] = raw.rows[r].affine(chunk, w, h);
    }
    const int group = chunk * F::kChunk + w * kGroup;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t x[4];
      if constexpr (F::kHalves) {
        columns.load_halves(tile, group, t, x);
      } else {
        columns.load8(tile, group + 8 * t, x);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (F::kHalves || (h == 0 && (w == 0 || !F::kIsRowScaled))) {
#pragma unroll
          for (int i = 0; i < 4; ++i) products[tile][i] = totals[tile][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
          multiply_half<T>(products[tile], a[0][i], a[1][i], x, h);
        }
        if constexpr (F::kIsInteger) multiply_half<T>(totals[tile], ones, ones, x, h);
        if (F::kHalves || (h == 1 && (w == F::kGroups - 1 || !F::kIsRowScaled))) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Affine& f = affine[i / 2][F::kHalves ? h : 0];
            sums[tile][i] = fmaf(f.scale, products[tile][i], sums[tile][i]);
            if constexpr (F::kIsInteger) {
              const float shift = fmaf(-F::template kBase<T>, f.scale, f.shift);
              sums[tile][i] = fmaf(shift, totals[tile][i % 2], sums[tile][i]);
            }
          }
        }
      }
    }
  }
}

template <class F, typename T, int kTiles>
__global__ void __launch_bounds__(kTileThreads, (kTileBlocks<F, kTiles>))
    linear_tile(const LinearArgs args) {
  const int64_t num_token_tiles =
      ceil_div(args.num_tokens, static_cast<int64_t>(kTiles * kTileTokens));
  // Blocks of the same rows are neighbours, so that the weights come from L2 for all but one.
  const int64_t tile = blockIdx.x / num_token_tiles;
  const int64_t first_token = blockIdx.x % num_token_tiles * (kTiles * kTileTokens);
  const KernelPart& part = part_of_tile(args, tile);
  const int64_t first_row = (tile - part.first_tile) * kTileRows;
  const int num_chunks = chunks_in_row<F>(args.num_cols);
  const TokenColumns<T, kTiles> columns(args, first_token);
  // Rows beyond the last are computed from the last and not written.
  const int last_row = static_cast<int>(part.num_rows) - 1;
  const int row = static_cast<int>(first_row) + lane_id() / 4;
  const int rows[2] = {min(row, last_row), min(row + 8, last_row)};
  float sums[kTiles][4] = {};
  stream_chunks<RawPair<F>, kTileDepth<kTiles>>(
      warp_id(), num_chunks, kTileWarps,
      [&](int chunk, RawPair<F>& raw) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          raw.rows[r].load(part, rows[r], chunk, num_chunks, lane_id() % 4);
        }
      },
      [&](int chunk, const RawPair<F>& raw) {
        add_chunk<F, T, kTiles>(raw, chunk, columns, sums);
      });
  finish_tile<kTiles>(args, part, first_row, first_token, sums);
}

// Weights of the activations' own type, in chunks of 64 columns.
constexpr int kFloatGroups = 2;

struct FloatStage {
  uint32_t words[2][kFloatGroups][4];  // row, group of 32 columns
};

template <typename T, int kTiles>
__global__ void __launch_bounds__(kTileThreads, kTiles > 1 ? 2 : 3)
    linear_float_tile(const LinearArgs args) {
  constexpr int kDepth = 3;
  constexpr int kColumns = kFloatGroups * kGroup;
  const int64_t num_token_tiles =
      ceil_div(args.num_tokens, static_cast<int64_t>(kTiles * kTileTokens));
  const int64_t tile = blockIdx.x / num_token_tiles;
  const int64_t first_token = blockIdx.x % num_token_tiles * (kTiles * kTileTokens);
  const KernelPart& part = part_of_tile(args, tile);
  const int64_t first_row = (tile - part.first_tile) * kTileRows;
  const int num_chunks = static_cast<int>(ceil_div(args.num_cols, static_cast<int64_t>(kColumns)));
  const TokenColumns<T, kTiles> columns(args, first_token);
  const int t = lane_id() % 4;
  const int64_t last_row = part.num_rows - 1;
  const T* const weight = reinterpret_cast<const T*>(part.low);
  const T* const rows[2] = {
      weight + min<int64_t>(first_row + lane_id() / 4, last_row) * args.num_cols,
      weight + min<int64_t>(first_row + lane_id() / 4 + 8, last_row) * args.num_cols};
  float sums[kTiles][4] = {};
  stream_chunks<FloatStage, kDepth>(
      warp_id(), num_chunks, kTileWarps,
      [&](int chunk, FloatStage& stage) {
#pragma unroll
        for (int w = 0; w < kFloatGroups; ++w) {
          const int column = chunk * kColumns + w * kGroup + 8 * t;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            Vec16 v = {};
            if (column < args.num_cols) v = load16_streaming(rows[r] + column);
            set_words(v, stage.words[r][w]);
          }
        }
      },
      [&](int chunk, const FloatStage& stage) {
#pragma unroll
        for (int w = 0; w < kFloatGroups; ++w) {
          const int column = chunk * kColumns + w * kGroup + 8 * t;
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            uint32_t x[4];
            columns.load8(i, column, x);
            multiply_half<T>(sums[i], stage.words[0][w], stage.words[1][w], x, 0);
            multiply_half<T>(sums[i], stage.words[0][w], stage.words[1][w], x, 1);
          }
        }
      });
  finish_tile<kTiles>(args, part, first_row, first_token, sums);
}

inline int64_t num_tiles(const LinearArgs& args) {
  const KernelPart& last = args.parts[args.num_parts - 1];
  return last.first_tile + ceil_div(last.num_rows, static_cast<int64_t>(kTileRows));
}

template <int kTiles>
Dim3 tile_grid(const LinearArgs& args) {
  const auto tokens = ceil_div(args.num_tokens, static_cast<int64_t>(kTiles * kTileTokens));
  return Dim3(static_cast<unsigned>(num_tiles(args) * tokens));
}

template <class F, typename T>
void launch_tiles(const LinearArgs& args, Stream stream) {
  if (args.num_tokens <= kTileTokens) {
    launch(&linear_tile<F, T, 1>, tile_grid<1>(args), Dim3(kTileThreads), 0, stream, args);
  } else {
    launch(&linear_tile<F, T, 2>, tile_grid<2>(args), Dim3(kTileThreads), 0, stream, args);
  }
}

template <typename T>
void launch_float_tiles(const LinearArgs& args, Stream stream) {
  if (args.num_tokens <= kTileTokens) {
    launch(&linear_float_tile<T, 1>, tile_grid<1>(args), Dim3(kTileThreads), 0, stream, args);
  } else {
    launch(&linear_float_tile<T, 2>, tile_grid<2>(args), Dim3(kTileThreads), 0, stream, args);
  }
}

}  // namespace llmserve::cuda
