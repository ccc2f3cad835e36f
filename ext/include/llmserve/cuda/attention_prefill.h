// Attention of sequences with several queries on tensor cores: a block's tile of queries over all
// tiles of keys that it sees. Included by attention_prefill_*.cu alone.
#pragma once

#include "llmserve/cuda/attention_prefill_warp.h"

namespace llmserve::cuda {

// Copies tiles of K and V to shared memory. Each warp has, one a lane, the block ids of the 16-key
// parts of the tile to come, so that no copy waits for the block table.
template <typename Cache, int kHeadDim>
class KeyTileLoader {
  using Shape = PrefillShape<Cache, kHeadDim>;

 public:
  // keys: what some row of the block sees. The rest of a tile becomes zeros, as its slots may hold
  // anything and 0 * NaN is NaN; table entries for it are not read.
  LLMSERVE_DEVICE KeyTileLoader(const AttentionArgs& args, int seq, int kv_head, KeyRange keys)
      : args_(args),
        table_(args.block_tables + seq * args.table_stride),
        kv_head_(kv_head),
        keys_(keys) {}

  LLMSERVE_DEVICE void find_blocks(int first_key) {
    const int key = first_key + lane_id() * kTileKeys;
    if (lane_id() >= Shape::kKeys / kTileKeys) return;
    if (key + kTileKeys <= keys_.begin || key >= keys_.end) return;
    block_id_ = table_[key / args_.block_size];
    slot_ = key % args_.block_size;
  }

  LLMSERVE_DEVICE void copy(int first_key, Shared<Cache> k, Shared<Cache> v) const {
    const int64_t row_stride = static_cast<int64_t>(args_.num_kv_heads) * kHeadDim;
    constexpr int kCopies = Shape::kKeys * Shape::kPieces;
#pragma unroll 1
    for (int first = 0; first < kCopies; first += Shape::kThreads) {
      // Shuffles are for whole warps: those without a copy make the last one's, of no effect.
      const int copy = first + static_cast<int>(threadIdx.x);
      const bool has_copy = kCopies % Shape::kThreads == 0 || copy < kCopies;
      const int row = min(copy / Shape::kPieces, Shape::kKeys - 1);
      const int column = copy % Shape::kPieces * (16 / static_cast<int>(sizeof(Cache)));
      const int64_t block_id = shuffle(block_id_, row / kTileKeys);
      const int slot = shuffle(slot_, row / kTileKeys) + row % kTileKeys;
      const int64_t offset = slot * row_stride + kv_head_ * kHeadDim + column;
      const bool is_visible = first_key + row >= keys_.begin && first_key + row < keys_.end;
      const int to = row * Shape::kPitch + column;
      if (has_copy) {
        copy_async16(
            k + to,
            static_cast<const Cache*>(args_.k_cache) + (block_id * args_.k_block_stride + offset),
            is_visible);
        copy_async16(
            v + to,
            static_cast<const Cache*>(args_.v_cache) + (block_id * args_.v_block_stride + offset),
            is_visible);
      }
    }
  }

 private:
  const AttentionArgs& args_;
  const int32_t* table_;
  int kv_head_;
  KeyRange keys_;
  int32_t block_id_ = 0;
  int32_t slot_ = 0;
};

// Copies the tile's queries to shared memory, zeros behind the last row: asynchronously, or for fp8
// converted to float16 in the order in which even_fp8 and odd_fp8 give the dimensions of K.
template <typename Cache, int kHeadDim>
LLMSERVE_DEVICE void load_queries(const AttentionArgs& args, const QueryTile& tile, int kv_head,
                                  Shared<half> queries) {
  using Shape = PrefillShape<Cache, kHeadDim>;
  const int group = args.num_heads / args.num_kv_heads;
  constexpr int kSpan = kIsFp8<Cache> ? 16 : 8;  // elements that a thread takes
  constexpr int kSpans = kHeadDim / kSpan;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kSpans; i += Shape::kThreads) {
    const int row = tile.first_row + i / kSpans;
    const bool is_row = row < tile.num_rows;
    const int64_t token = tile.first_token + (is_row ? row / group : 0);
    const int head = kv_head * group + (is_row ? row % group : 0);
    const int64_t from =
        token * args.q_token_stride + head * args.q_head_stride + i % kSpans * kSpan;
    const int to = i / kSpans * Shape::kQueryPitch + i % kSpans * kSpan;
    if constexpr (kIsFp8<Cache>) {
      Vec16 pieces[2];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int64_t at = from + 4 * t + j;
          const uint32_t pair = pack_pair<half>(load_element(args.q, args.type, at),
                                                load_element(args.q, args.type, at + 2));
          pieces[j].w[t] = is_row ? pair : 0;
        }
      }
      queries.store16(to, pieces[0]);
      queries.store16(to + 8, pieces[1]);
    } else {
      copy_async16(queries + to, static_cast<const uint16_t*>(args.q) + from, is_row);
    }
  }
}

template <typename Math, typename Cache, int kHeadDim>
__global__ void __launch_bounds__(PrefillShape<Cache, kHeadDim>::kThreads)
    attention_prefill(const AttentionArgs args) {
  using Shape = PrefillShape<Cache, kHeadDim>;
  SharedMemory memory;
  const Shared<half> queries = memory.take<half>(Shape::kQueryTile);
  const Shared<Cache> tiles = memory.take<Cache>(4 * Shape::kTile);  // K, V, K, V

  // The last tiles of a sequence see the most keys: they go first.
  const QueryTile tile =
      find_query_tile<Shape::kRows>(args, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (tile.first_row >= tile.num_rows) return;
  if (tile.num_queries == 1 && tile.seq < args.num_seqs) return;  // attention_decode's
  // For the end, in the padding of the first row, as registers are short in between and as head_dim
  // 256 fills the shared memory that a block of sm_89 has, to the last byte.
  static_assert((Shape::kQueryPitch - kHeadDim) * sizeof(half) >= 3 * sizeof(int));
  const Shared<int> kept = (queries + kHeadDim).template as<int>();
  if (threadIdx.x == 0) {
    kept[0] = tile.first_token;
    kept[1] = tile.first_row;
    kept[2] = tile.num_rows;
  }
  const int kv_head = static_cast<int>(blockIdx.y);
  const int group = args.num_heads / args.num_kv_heads;
  const int offset = tile.seq_len - tile.num_queries;
  const int last_row = min(tile.first_row + Shape::kRows, tile.num_rows) - 1;
  const KeyRange keys = {visible_keys(offset + tile.first_row / group, args.sliding_window).begin,
                         visible_keys(offset + last_row / group, args.sliding_window).end};

  load_queries<Cache, kHeadDim>(args, tile, kv_head, queries);
  const Shared<half> warp_queries = queries + warp_id() * Shape::kWarpRows * Shape::kQueryPitch;
  PrefillWarp<Math, Cache, kHeadDim> warp(args, tile, kv_head, warp_queries);
  if (keys.end > keys.begin) {
    KeyTileLoader<Cache, kHeadDim> loader(args, tile.seq, kv_head, keys);
    int key = keys.begin / Shape::kKeys * Shape::kKeys;
    loader.find_blocks(key);
    loader.copy(key, tiles, tiles + Shape::kTile);
    copy_commit();
    loader.find_blocks(key + Shape::kKeys);
    int stage = 0;
    for (; key < keys.end; key += Shape::kKeys) {
      // One barrier a tile: behind it, this tile is there and all warps have left the one before,
      // whose memory the next tile takes while this one is worked on.
      copy_wait<0>();
      block_sync();
      const Shared<Cache> k = tiles + stage * 2 * Shape::kTile;
      stage = 1 - stage;
      if (key + Shape::kKeys < keys.end) {
        const Shared<Cache> next = tiles + stage * 2 * Shape::kTile;
        loader.copy(key + Shape::kKeys, next, next + Shape::kTile);
        loader.find_blocks(key + 2 * Shape::kKeys);
      }
      copy_commit();
      warp.attend(k, k + Shape::kTile, key);
    }
  } else {
    copy_commit();
    copy_wait<0>();
    block_sync();
  }
  warp.finish(args, kept[0], kept[1], kept[2], kv_head, warp_queries.template as<uint32_t>());
}

template <typename Math, typename Cache, int kHeadDim>
void launch_prefill(const AttentionArgs& args, Stream stream) {
  using Shape = PrefillShape<Cache, kHeadDim>;
  const int group = args.num_heads / args.num_kv_heads;
  const int num_tiles = first_tile<Shape::kRows>(args.num_tokens, group, args.num_seqs + 1);
  const Dim3 grid(static_cast<unsigned>(num_tiles), static_cast<unsigned>(args.num_kv_heads));
  launch(attention_prefill<Math, Cache, kHeadDim>, grid, Dim3(Shape::kThreads), Shape::kSharedBytes,
         stream, args);
}

template <typename Math, typename Cache>
void launch_prefill(const AttentionArgs& args, Stream stream) {
  switch (args.head_dim) {
    case 64:
      return launch_prefill<Math, Cache, 64>(args, stream);
    case 80:
      return launch_prefill<Math, Cache, 80>(args, stream);
    case 96:
      return launch_prefill<Math, Cache, 96>(args, stream);
    case 128:
      return launch_prefill<Math, Cache, 128>(args, stream);
    default:
      return launch_prefill<Math, Cache, 256>(args, stream);
  }
}

}  // namespace llmserve::cuda
