// A warp's share of decoding: tiles of keys for one query and up to eight query heads that share a
// KV head. Decoding is bound by the bytes of K and V. What that needs of the kernel:
//
//   - Each byte is loaded once, for all query heads, by 16-byte cp.async past L1 and registers.
//   - Enough bytes are under way. By Little's law 4.8 TB/s (H200) times about 0.7 us of latency
//     under load are 3.4 MB, 26 KB for each of 132 multiprocessors. A warp has kStages - 1 tiles
//     under way beside the one that it works on; docs/cuda_attention.md has the sums.
//   - No warp waits for another: each has its own tiles (every kWarps-th of the split), its own
//     buffers and its own softmax. The block meets once, to merge its warps.
//
// Products are transposed, so that keys and dimensions fill the 16 rows of a tensor-core product
// and query heads its 8 columns:
//
//   scores [16 keys, 8 heads]  = K [16 keys, head_dim] . Q^T [head_dim, 8 heads]
//   out [16 dimensions, 8 heads] += V^T [16 dimensions, 16 keys] . P^T [16 keys, 8 heads]
#pragma once

#include "llmserve/cuda/attention_device.h"

namespace llmserve::cuda {

template <typename Cache, int kHeadDim>
struct DecodeShape {
  static constexpr int kRowBytes = kHeadDim * sizeof(Cache);
  static constexpr int kPieces = kRowBytes / 16;
  // 60 to 75 KB of shared memory in all: three blocks on a multiprocessor of an H100, one on an
  // Ada.
  static constexpr int kWarps = kRowBytes > 256 ? 2 : 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kStages = kRowBytes > 160 ? 2 : kRowBytes > 96 ? 3 : 4;
  static constexpr int kPitch = tile_pitch<Cache>(kHeadDim);
  static constexpr int kTile = kTileKeys * kPitch;         // K or V of a tile, elements
  static constexpr int kWarpBuffer = kStages * 2 * kTile;  // elements
  static constexpr int kMergePitch = kHeadDim + 4;         // floats; 4: spreads heads over banks
  static constexpr int kMerge = kHeadsPerBlock * kMergePitch;  // of a warp, floats

  static constexpr size_t kSharedBytes =
      max(shared_bytes<Cache>(kWarps * kWarpBuffer), shared_bytes<float>(kWarps* kMerge));
};

// What a warp knows about its keys so far, for the two heads of the calling lane (columns 2t, 2t +
// 1 with t = lane % 4). The denominators are sums over the lane's own keys until merge_lanes().
template <int kHeadDim>
struct DecodeState {
  float out[kHeadDim / 16][4];
  float m[2];
  float denominator[2];
};

// The tiles of one warp in one split.
struct WarpTiles {
  int first_key;  // of the first one
  int count;
};

template <typename Math, typename Cache, int kHeadDim>
class DecodeWarp {
  using Shape = DecodeShape<Cache, kHeadDim>;

 public:
  // buffer: the warp's Shape::kWarpBuffer elements.
  LLMSERVE_DEVICE DecodeWarp(const AttentionArgs& args, int seq, int kv_head, Shared<Cache> buffer)
      : args_(args),
        table_(args.block_tables + seq * args.table_stride),
        kv_head_(kv_head),
        buffer_(buffer),
        logit_(args, head_scale(args.k_scale, kv_head) * kOperandScale<Cache>) {}

  // Lane (g, t) holds dimensions of head g for each product of 16: for fp8, in the order in which
  // even_fp8 and odd_fp8 give those of K.
  LLMSERVE_DEVICE void load_queries(int token, int first_head, int num_heads) {
    const int g = lane_id() / 4;
    const int t = lane_id() % 4;
    const int64_t start =
        token * args_.q_token_stride + (first_head + min(g, num_heads - 1)) * args_.q_head_stride;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t pair;
        if constexpr (kIsFp8<Cache>) {
          const int64_t at = start + 16 * i + 4 * t + j;
          pair = pack_pair<half>(load_element(args_.q, args_.type, at),
                                 load_element(args_.q, args_.type, at + 2));
        } else {
          const int64_t at = start + 16 * i + 8 * j + 2 * t;
          pair = static_cast<const uint32_t*>(args_.q)[at / 2];
        }
        q_[i][j] = g < num_heads ? pair : 0;
      }
    }
  }

  LLMSERVE_DEVICE void run(WarpTiles tiles, KeyRange keys, DecodeState<kHeadDim>& state) {
    clear(state);
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) load_tile(tiles, keys, i);
    for (int i = 0; i < tiles.count; ++i) {
      copy_wait<Shape::kStages - 1>();
      warp_sync();
      const Shared<Cache> k = buffer_ + i % Shape::kStages * 2 * Shape::kTile;
      attend(k, k + Shape::kTile, tile_key(tiles, i), keys, state);
      warp_sync();
      load_tile(tiles, keys, i + Shape::kStages);
    }
  }

 private:
  LLMSERVE_DEVICE static int tile_key(WarpTiles tiles, int i) {
    return tiles.first_key + i * Shape::kWarps * kTileKeys;
  }

  LLMSERVE_DEVICE static void clear(DecodeState<kHeadDim>& state) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      state.m[j] = -INFINITY;
      state.denominator[j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.out[i][j] = 0.0f;
    }
  }

  // Starts the copy of the warp's i-th tile, as a group of its own even if there is no such tile.
  // Keys outside the range are zeros: their slots may hold anything, and 0 * NaN is NaN.
  LLMSERVE_DEVICE void load_tile(WarpTiles tiles, KeyRange keys, int i) {
    if (i < tiles.count) {
      const int lane = lane_id();
      if (i % kWarpSize == 0) {  // the block ids of the next 32 tiles, one a lane
        const int key = tile_key(tiles, min(i + lane, tiles.count - 1));
        block_ids_ = table_[key / args_.block_size];
      }
      const int64_t block_id = shuffle(block_ids_, i % kWarpSize);
      const int key = tile_key(tiles, i);
      const int row_stride = args_.num_kv_heads * kHeadDim;
      const int64_t offset =
          static_cast<int64_t>(key % args_.block_size) * row_stride + kv_head_ * kHeadDim;
      const Cache* k =
          static_cast<const Cache*>(args_.k_cache) + (block_id * args_.k_block_stride + offset);
      const Cache* v =
          static_cast<const Cache*>(args_.v_cache) + (block_id * args_.v_block_stride + offset);
      const Shared<Cache> tile = buffer_ + i % Shape::kStages * 2 * Shape::kTile;
      constexpr int kCopies = kTileKeys * Shape::kPieces;
#pragma unroll
      for (int first = 0; first < kCopies; first += kWarpSize) {
        const int copy = first + lane;
        if (kCopies % kWarpSize != 0 && copy >= kCopies) break;
        const int row = copy / Shape::kPieces;
        const int column = copy % Shape::kPieces * (16 / static_cast<int>(sizeof(Cache)));
        const bool is_visible = key + row >= keys.begin && key + row < keys.end;
        const int to = row * Shape::kPitch + column;
        const int from = row * row_stride + column;
        copy_async16(tile + to, k + from, is_visible);
        copy_async16(tile + (Shape::kTile + to), v + from, is_visible);
      }
    }
    copy_commit();
  }

  LLMSERVE_DEVICE void attend(Shared<Cache> k, Shared<Cache> v, int first_key, KeyRange keys,
                              DecodeState<kHeadDim>& state) const {
    float scores[4];  // keys g (0, 1) and g + 8 (2, 3) of heads 2t (0, 2) and 2t + 1 (1, 3)
    multiply_keys(k, scores);
    const int key = first_key + lane_id() / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = key + j / 2 * 8;
      scores[j] = at >= keys.begin && at < keys.end ? logit_(scores[j]) : -INFINITY;
    }
    float rescale[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = max(scores[j], scores[j + 2]);
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) m = max(m, shuffle_xor(m, mask));
      m = max(state.m[j], m);
      rescale[j] = fast_exp2(state.m[j] - finite_max(m));
      scores[j] = fast_exp2(scores[j] - finite_max(m));
      scores[j + 2] = fast_exp2(scores[j + 2] - finite_max(m));
      state.m[j] = m;
      state.denominator[j] = state.denominator[j] * rescale[j] + (scores[j] + scores[j + 2]);
    }
    const uint32_t p[2] = {transpose(pack_pair<Math>(scores[0], scores[1])),
                           transpose(pack_pair<Math>(scores[2], scores[3]))};
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.out[i][j] *= rescale[j % 2];
    }
    multiply_values(v, p, state);
  }

  // Two sums, as each product waits for the one before it in the same sum.
  LLMSERVE_DEVICE void multiply_keys(Shared<Cache> k, float (&scores)[4]) const {
    float even[4] = {};
    float odd[4] = {};
    const int lane = lane_id();
    const Shared<Cache> row = k + lane % 16 * Shape::kPitch;
    if constexpr (kIsFp8<Cache>) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; i += 2) {
        // 16 keys and 32 dimensions at a time; the second half of the last ones may not exist.
        const bool has_second = i + 1 < kHeadDim / 16;
        uint32_t r[4];
        load_matrix_x4(r, row + (16 * i + (has_second ? lane / 16 * 16 : 0)));
        const uint32_t a[4] = {even_fp8(r[0]), even_fp8(r[1]), odd_fp8(r[0]), odd_fp8(r[1])};
        mma_16816<half>(even, a, q_[i]);
        if (has_second) {
          const uint32_t b[4] = {even_fp8(r[2]), even_fp8(r[3]), odd_fp8(r[2]), odd_fp8(r[3])};
          mma_16816<half>(odd, b, q_[min(i + 1, kHeadDim / 16 - 1)]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        uint32_t a[4];
        load_matrix_x4(a, row + (16 * i + lane / 16 * 8));
        mma_16816<Math>(i % 2 == 0 ? even : odd, a, q_[i]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) scores[j] = even[j] + odd[j];
  }

  LLMSERVE_DEVICE void multiply_values(Shared<Cache> v, const uint32_t (&p)[2],
                                       DecodeState<kHeadDim>& state) const {
    const int lane = lane_id();
    // Lanes 0 to 15 address keys 0 to 7, the others keys 8 to 15; half of each the next dimensions.
    const Shared<Cache> row = v + (lane % 8 + lane / 16 * 8) * Shape::kPitch;
    if constexpr (kIsFp8<Cache>) {
      // Rows g of a product are dimensions 2g, rows g + 8 are 2g + 1: see dimension().
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; i += 2) {
        const bool has_second = i + 1 < kHeadDim / 16;
        uint32_t r[4];
        load_matrix_x4_trans(r, row + (16 * i + (has_second ? lane / 8 % 2 * 16 : 0)));
        const uint32_t a[4] = {even_fp8(r[0]), odd_fp8(r[0]), even_fp8(r[2]), odd_fp8(r[2])};
        mma_16816<half>(state.out[i], a, p);
        if (has_second) {
          const uint32_t b[4] = {even_fp8(r[1]), odd_fp8(r[1]), even_fp8(r[3]), odd_fp8(r[3])};
          mma_16816<half>(state.out[min(i + 1, kHeadDim / 16 - 1)], b, p);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        uint32_t a[4];
        load_matrix_x4_trans(a, row + (16 * i + lane / 8 % 2 * 8));
        mma_16816<Math>(state.out[i], a, p);
      }
    }
  }

  // An 8 by 8 matrix of pairs of neighbouring columns, as a product leaves it, into pairs of
  // neighbouring rows, as the next product takes it: lane (g, t) gets (2t, g) and (2t + 1, g).
  LLMSERVE_DEVICE static uint32_t transpose(uint32_t pair) {
    const int g = lane_id() / 4;
    const int t = lane_id() % 4;
    const uint32_t low = shuffle(pair, 8 * t + g / 2);
    const uint32_t high = shuffle(pair, 8 * t + 4 + g / 2);
    return byte_permute(low, high, g % 2 == 0 ? 0x5410u : 0x7632u);
  }

  const AttentionArgs& args_;
  const int32_t* table_;
  int kv_head_;
  Shared<Cache> buffer_;
  Logit logit_;
  uint32_t q_[kHeadDim / 16][2];
  int32_t block_ids_ = 0;
};

// The dimension that row `g` (+ 8 with `is_lower`) of output product i stands for.
template <typename Cache>
LLMSERVE_DEVICE int decode_dimension(int i, int g, bool is_lower) {
  if constexpr (kIsFp8<Cache>) return 16 * i + 2 * g + (is_lower ? 1 : 0);
  return 16 * i + g + (is_lower ? 8 : 0);
}

}  // namespace llmserve::cuda
