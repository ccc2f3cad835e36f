// The unit of attention work, and the functions on it that exist once per instruction set.
//
// A tile is a run of queries of one sequence with the heads of one or more KV heads. Its rows are
// (KV head, query, head) triples, in this order. The context is divided into ranges of kRange keys,
// aligned to absolute positions. A row's softmax is computed for each range on its own, with
// reductions whose order depends on positions alone; the partial results are then merged in
// ascending order. So a row's result is the same bits whatever shares the tile, the batch or the
// step with it, and whether one thread walks over the ranges or several do.
#pragma once

#include <cstdint>

#include "llmserve/attention.h"

namespace llmserve {

constexpr int64_t kRange = 128;       // keys
constexpr int64_t kMaxHeadRows = 64;  // rows per KV head; more only if a single query has more
// Tiles of at most so many rows per KV head read the cache as it is, and may have several KV heads,
// which lie side by side in memory; others unpack K and V to floats first.
constexpr int64_t kMaxDirectRows = 8;
constexpr int64_t kRowHeader = 8;     // floats before the output in a row's record

struct Tile {
  int64_t seq;
  int64_t first_kv_head;
  int64_t num_kv_heads;
  int64_t first_query;  // within the sequence's queries of this step
  int64_t num_queries;
  int64_t first_range;
  int64_t end_range;
  float* partials;  // records [end_range - first_range, num_rows], if the ranges are split up
};

// A row's record: m (maximum), d (denominator; 0: saw no key), unused, then o (output times d).
// Records and padded rows have head_dim rounded up to a multiple of 8.
inline int64_t padded_dim(const AttentionArgs& args) { return (args.head_dim + 7) / 8 * 8; }
inline int64_t record_size(const AttentionArgs& args) { return kRowHeader + padded_dim(args); }
inline int64_t heads_per_kv_head(const AttentionArgs& args) {
  return args.num_heads / args.num_kv_heads;
}
inline int64_t rows_per_kv_head(const AttentionArgs& args, int64_t num_queries) {
  return num_queries * heads_per_kv_head(args);
}
inline int64_t num_rows(const AttentionArgs& args, const Tile& tile) {
  return tile.num_kv_heads * rows_per_kv_head(args, tile.num_queries);
}
inline bool is_direct(const AttentionArgs& args, int64_t num_queries) {
  return rows_per_kv_head(args, num_queries) <= kMaxDirectRows && args.head_dim % 8 == 0;
}
// Rows of the unpacked K and V are this far apart, so that equal columns differ in cache set.
inline int64_t unpacked_stride(const AttentionArgs& args) { return padded_dim(args) + 16; }

// Scratch memory of one thread.
struct TileBuffers {
  float* q;        // [num_rows, padded_dim]
  float* scores;   // [num_rows, kRange]
  float* partial;  // records [num_rows]: one range
  float* total;    // records [num_rows]: all ranges so far
  float* keys;     // [kRange, unpacked_stride]
  float* values;   // [kRange, unpacked_stride]
  int64_t* low;    // [num_rows]: first key of the range that the row sees
  int64_t* high;   // [num_rows]: one past the last
};

struct AttentionKernels {
  // Attends to the ranges [begin, end). Writes the tile's rows of the output, or the tile's partial
  // records where it has some. False if a block table names a block that does not exist.
  bool (*attend)(const AttentionArgs& args, const Tile& tile, int64_t begin, int64_t end,
                 const TileBuffers& buffers);
  // Merges the tile's partial records and writes its rows of the output.
  void (*merge)(const AttentionArgs& args, const Tile& tile, const TileBuffers& buffers);
  // Rounds `count` values to elements of the cache.
  void (*pack)(const float* source, CacheType type, void* target, int64_t count);
};

const AttentionKernels& attention_kernels_portable();
#if defined(__x86_64__)
const AttentionKernels& attention_kernels_avx2();
#endif
// Those of the current instruction set.
const AttentionKernels& attention_kernels();

}  // namespace llmserve
