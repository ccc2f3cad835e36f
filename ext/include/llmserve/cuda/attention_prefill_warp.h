// Attention of sequences with several queries on tensor cores, in the manner of FlashAttention-2
// (Dao, 2023, arXiv 2307.08691): a block keeps a tile of queries and walks over tiles of keys, with
// the softmax of Milakov and Gimelshein (2018, arXiv 1805.02867) in powers of two. This is a warp's
// share.
//
// The rows of a block's tile are the queries of a sequence times the query heads of one KV head,
// heads fastest, so that all heads of a group share what is loaded: row r is query r / group, head
// r % group. Query i of a sequence is at position seq_len - num_queries + i; what is before its
// first query has been computed earlier, or by another request, and is found through the block
// table like the rest.
//
// Tiles of keys start at multiples of kKeys, and a tile in which a row sees nothing leaves that
// row's numbers as they are, to the bit. So a row's result depends neither on the other rows nor on
// how the prompt was divided into chunks, unless a chunk is one query alone: that goes to
// attention_decode().
#pragma once

#include "llmserve/cuda/attention_device.h"

namespace llmserve::cuda {

template <typename Cache, int kHeadDim>
struct PrefillShape {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  // Rows of a warp in units of 16. With two, each operand from K and V serves two products, which
  // halves the reads of shared memory; head_dim 256 has no registers for that.
  static constexpr int kUnits = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kUnits;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kKeys = kHeadDim <= (kIsFp8<Cache> ? 80 : 96) ? 64 : 32;
  static constexpr int kPieces = kHeadDim * static_cast<int>(sizeof(Cache)) / 16;
  static constexpr int kPitch = tile_pitch<Cache>(kHeadDim);
  static constexpr int kTile = kKeys * kPitch;  // K or V, elements
  static constexpr int kQueryPitch = tile_pitch<half>(kHeadDim);
  static constexpr int kQueryTile = kRows * kQueryPitch;  // 16-bit elements
  static constexpr size_t kSharedBytes =
      shared_bytes<half>(kQueryTile) + shared_bytes<Cache>(4 * kTile);
};

// Tiles of sequence `seq` in the grid begin here. Sequences have more room than they need, so that
// a block finds its sequence by a search in cu_seqlens_q: ceil(n / rows) tiles never need more than
// floor((begin + n) / rows) - floor(begin / rows) + 1.
template <int kRows>
LLMSERVE_BOTH int first_tile(int first_query, int group, int seq) {
  return static_cast<int>(static_cast<int64_t>(first_query) * group / kRows) + seq;
}

// The tile of one block: rows [first_row, num_rows) of a sequence, at most PrefillShape::kRows.
struct QueryTile {
  int seq;  // num_seqs: the tokens behind the last sequence, which see no key
  int first_token;
  int num_queries;
  int seq_len;
  int first_row;
  int num_rows;  // of the sequence, not of the tile
};

template <int kRows>
LLMSERVE_DEVICE QueryTile find_query_tile(const AttentionArgs& args, int tile) {
  const int group = args.num_heads / args.num_kv_heads;
  int low = 0;
  int high = args.num_seqs;
  while (low < high) {  // the last sequence that begins at or before the tile
    const int middle = (low + high + 1) / 2;
    if (first_tile<kRows>(args.cu_seqlens_q[middle], group, middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const bool is_tail = low == args.num_seqs;
  const int begin = args.cu_seqlens_q[low];
  const int end = is_tail ? args.num_tokens : args.cu_seqlens_q[low + 1];
  const int row = (tile - first_tile<kRows>(begin, group, low)) * kRows;
  return {low, begin, end - begin, is_tail ? 0 : args.seq_lens[low], row, (end - begin) * group};
}

template <typename Math, typename Cache, int kHeadDim>
class PrefillWarp {
  using Shape = PrefillShape<Cache, kHeadDim>;
  static constexpr int kUnits = Shape::kUnits;
  static constexpr int kKeyGroups = Shape::kKeys / 8;

 public:
  // queries: the warp's own Shape::kWarpRows rows of the tile.
  LLMSERVE_DEVICE PrefillWarp(const AttentionArgs& args, const QueryTile& tile, int kv_head,
                              Shared<half> queries)
      : queries_(queries),
        logit_(args, head_scale(args.k_scale, kv_head) * kOperandScale<Cache>),
        sliding_window_(args.sliding_window) {
    const int group = args.num_heads / args.num_kv_heads;
    const int first = tile.first_row + warp_id() * Shape::kWarpRows;
    const int last = min(first + Shape::kWarpRows, tile.num_rows) - 1;
    const int offset = tile.seq_len - tile.num_queries;
    if (last >= first) {
      first_end_ = visible_keys(offset + first / group, 0).end;
      last_end_ = visible_keys(offset + last / group, 0).end;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 16 * u + 8 * h + lane_id() / 4;
        end_[u][h] = row <= last ? visible_keys(offset + row / group, 0).end : 0;
        m_[u][h] = -INFINITY;
        denominator_[u][h] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out_[u][i][j] = 0.0f;
      }
    }
  }

  LLMSERVE_DEVICE void attend(Shared<Cache> k, Shared<Cache> v, int first_key) {
    const int end = first_key + Shape::kKeys;
    if (first_key >= last_end_ || end <= window_begin(first_end_)) return;  // no row sees any
    float scores[kUnits][kKeyGroups][4];
    multiply_keys(k, scores);
    if (logit_.cap > 0.0f) cap(scores);
    const bool all_see_all = end <= first_end_ && first_key >= window_begin(last_end_);
    if (!all_see_all) mask(scores, first_key);
    uint32_t p[kUnits][kKeyGroups][2];
    softmax(scores, p);
    multiply_values(v, p);
  }

  // Writes the warp's rows to the output by way of `rows`, which may be where its queries are.
  // first_token is the sequence's, first_row the tile's.
  LLMSERVE_DEVICE void finish(const AttentionArgs& args, int first_token, int first_row,
                              int num_rows, int kv_head, Shared<uint32_t> rows) {
    const int group = args.num_heads / args.num_kv_heads;
    const int first = first_row + warp_id() * Shape::kWarpRows;
    const float value_scale = head_scale(args.v_scale, kv_head) * kOperandScale<Cache>;
    const int g = lane_id() / 4;
    const int t = lane_id() % 4;
    warp_sync();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = kv_head * group + (first + 16 * u + 8 * h + g) % group;
        const float factor =
            value_scale * normalizer(args, head, m_[u][h], group_sum<4>(denominator_[u][h]));
        const Shared<uint32_t> to = rows + (16 * u + 8 * h + g) * (Shape::kQueryPitch / 2);
#pragma unroll
        for (int i = 0; i < kHeadDim / 8; i += 2) {
          const float a[2] = {out_[u][i][2 * h] * factor, out_[u][i][2 * h + 1] * factor};
          const float b[2] = {out_[u][i + 1][2 * h] * factor, out_[u][i + 1][2 * h + 1] * factor};
          if constexpr (kIsFp8<Cache>) {
            // Dimensions 4t, 4t + 2 and 4t + 1, 4t + 3 of 16: see multiply_values().
            to[4 * i + 2 * t] = pack_output(args.type, a[0], b[0]);
            to[4 * i + 2 * t + 1] = pack_output(args.type, a[1], b[1]);
          } else {
            to[4 * i + t] = pack_pair<Math>(a[0], a[1]);
            to[4 * i + t + 4] = pack_pair<Math>(b[0], b[1]);
          }
        }
      }
    }
    warp_sync();
    constexpr int kRowPieces = kHeadDim / 8;
#pragma unroll 1
    for (int i = lane_id(); i < Shape::kWarpRows * kRowPieces; i += kWarpSize) {
      const int row = first + i / kRowPieces;
      if (row >= num_rows) break;
      const int64_t token = first_token + row / group;
      const int64_t at = (token * args.num_heads + kv_head * group + row % group) * kHeadDim;
      const int piece = i % kRowPieces;
      store16(static_cast<uint16_t*>(args.out) + at + 8 * piece,
              rows.load16(i / kRowPieces * (Shape::kQueryPitch / 2) + 4 * piece));
    }
  }

 private:
  LLMSERVE_DEVICE static uint32_t pack_output(DType type, float low, float high) {
    return type == DType::kFloat16 ? pack_pair<half>(low, high) : pack_pair<bfloat16>(low, high);
  }

  LLMSERVE_DEVICE void multiply_keys(Shared<Cache> k,
                                     float (&scores)[kUnits][kKeyGroups][4]) const {
    const int lane = lane_id();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kKeyGroups; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[u][i][j] = 0.0f;
      }
    }
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      uint32_t a[kUnits][4];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        load_matrix_x4(a[u],
                       queries_ + ((16 * u + lane % 16) * Shape::kQueryPitch + d + lane / 16 * 8));
      }
      if constexpr (kIsFp8<Cache>) {
#pragma unroll
        for (int i = 0; i < kKeyGroups; i += 4) {  // 32 keys, 16 dimensions
          uint32_t r[4];
          load_matrix_x4(r, k + ((8 * i + lane) * Shape::kPitch + d));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t b[2] = {even_fp8(r[j]), odd_fp8(r[j])};
#pragma unroll
            for (int u = 0; u < kUnits; ++u) mma_16816<half>(scores[u][i + j], a[u], b);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kKeyGroups; i += 2) {  // 16 keys, 16 dimensions
          uint32_t r[4];
          load_matrix_x4(
              r, k + ((8 * i + lane % 8 + lane / 16 * 8) * Shape::kPitch + d + lane / 8 % 2 * 8));
          const uint32_t b[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            mma_16816<Math>(scores[u][i], a[u], b[0]);
            mma_16816<Math>(scores[u][i + 1], a[u], b[1]);
          }
        }
      }
    }
  }

  // The first key that is visible to a row which sees none from `end` on.
  LLMSERVE_DEVICE int window_begin(int end) const {
    return sliding_window_ > 0 ? end - sliding_window_ : 0;
  }

  LLMSERVE_DEVICE void cap(float (&scores)[kUnits][kKeyGroups][4]) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kKeyGroups; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[u][i][j] = logit_.capped(scores[u][i][j]);
      }
    }
  }

  LLMSERVE_DEVICE void mask(float (&scores)[kUnits][kKeyGroups][4], int first_key) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kKeyGroups; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = first_key + 8 * i + 2 * (lane_id() % 4) + j % 2;
          const int end = end_[u][j / 2];
          if (key >= end || key < window_begin(end)) scores[u][i][j] = -INFINITY;
        }
      }
    }
  }

  // Scores into weights as operands of the next product, and what was before rescaled to the new
  // maximum. That is skipped where no maximum of the warp has changed, which changes no bit.
  LLMSERVE_DEVICE void softmax(const float (&scores)[kUnits][kKeyGroups][4],
                               uint32_t (&p)[kUnits][kKeyGroups][2]) {
    const float multiplier = logit_.cap > 0.0f ? 1.0f : logit_.multiplier;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float rescale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = -INFINITY;
#pragma unroll
        for (int i = 0; i < kKeyGroups; ++i) {
          m = max(m, max(scores[u][i][2 * h], scores[u][i][2 * h + 1]));
        }
        m = max(m_[u][h], group_max<4>(m) * multiplier);
        const float base = finite_max(m);
        rescale[h] = fast_exp2(m_[u][h] - base);
        m_[u][h] = m;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kKeyGroups; ++i) {
          const float low = fast_exp2(fmaf(scores[u][i][2 * h], multiplier, -base));
          const float high = fast_exp2(fmaf(scores[u][i][2 * h + 1], multiplier, -base));
          sum += low + high;
          p[u][i][h] = pack_pair<Math>(low, high);
        }
        denominator_[u][h] = denominator_[u][h] * rescale[h] + sum;
      }
      if (!warp_any(rescale[0] != 1.0f || rescale[1] != 1.0f)) continue;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out_[u][i][j] *= rescale[j / 2];
      }
    }
  }

  LLMSERVE_DEVICE void multiply_values(Shared<Cache> v,
                                       const uint32_t (&p)[kUnits][kKeyGroups][2]) {
    const int lane = lane_id();
    if constexpr (kIsFp8<Cache>) {
      // 32 keys, 16 dimensions: out_[2i] has the even ones, out_[2i + 1] the odd ones.
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; i += 2) {
#pragma unroll
        for (int key = 0; key < Shape::kKeys; key += 32) {
          uint32_t r[4];
          load_matrix_x4_trans(r, v + ((key + lane) * Shape::kPitch + 8 * i));
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            const uint32_t even[2] = {even_fp8(r[j]), even_fp8(r[j + 1])};
            const uint32_t odd[2] = {odd_fp8(r[j]), odd_fp8(r[j + 1])};
            accumulate(i, key / 8 + j, p, even, odd);
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; i += 2) {
#pragma unroll
        for (int key = 0; key < Shape::kKeys; key += 16) {
          uint32_t r[4];
          load_matrix_x4_trans(r, v + ((key + lane % 16) * Shape::kPitch + 8 * i + lane / 16 * 8));
          const uint32_t low[2] = {r[0], r[1]};
          const uint32_t high[2] = {r[2], r[3]};
          accumulate(i, key / 8, p, low, high);
        }
      }
    }
  }

  // out_[i] and out_[i + 1] plus the weights of key groups `group` and `group + 1` times values.
  LLMSERVE_DEVICE void accumulate(int i, int group, const uint32_t (&p)[kUnits][kKeyGroups][2],
                                  const uint32_t (&low)[2], const uint32_t (&high)[2]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t a[4] = {p[u][group][0], p[u][group][1], p[u][group + 1][0],
                             p[u][group + 1][1]};
      mma_16816<Math>(out_[u][i], a, low);
      mma_16816<Math>(out_[u][i + 1], a, high);
    }
  }

  Shared<half> queries_;
  Logit logit_;
  int sliding_window_;
  int first_end_ = 0;   // behind the last key that the warp's first row sees; 0: it has no rows
  int last_end_ = 0;    // the same of its last row
  int end_[kUnits][2];  // the same of rows 16 u + 8 h + lane / 4
  float m_[kUnits][2];
  float denominator_[kUnits][2];  // the lane's share
  float out_[kUnits][kHeadDim / 8][4];
};

}  // namespace llmserve::cuda
