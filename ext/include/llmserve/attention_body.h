// The functions of AttentionKernels, included by one source file per instruction set, like vec8.h.
// Softmax over ranges as in Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018, arXiv 1805.02867, and tiles as in Dao, "FlashAttention-2", 2023, arXiv 2307.08691; unlike
// there, ranges start at fixed positions and are reduced apart from each other.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "llmserve/attention_tile.h"
#include "llmserve/vec_math.h"

namespace llmserve {
namespace {

constexpr int64_t kChunk = 16;      // keys that stay in the first-level cache
template <typename T>
constexpr int64_t kCacheLine = 64 / static_cast<int64_t>(sizeof(T));  // elements
constexpr int64_t kSlice = 32;      // columns of V that do, for a whole range
// Keys that a tile which reads the cache as it is fetches ahead into the second-level cache. A hint
// for the first level gains less.
constexpr int64_t kAhead = 20;

template <typename T>
struct RangeData {
  // K of the tile's first KV head; the next one's is head_dim further on. Behind the last of either
  // is what is read next: V, and behind V its last row.
  const T* keys[kRange + kAhead];
  const T* values[kRange + kAhead];
  int64_t begin;  // keys of the range that any row sees
  int64_t end;
};

struct Shape {
  int64_t dim;  // padded
  int64_t num_kv_heads;
  int64_t rows_per_head;
  bool is_direct;

  int64_t num_rows() const { return num_kv_heads * rows_per_head; }
  int64_t record() const { return kRowHeader + dim; }
};

// Up to four rows of one KV head, which are worked on together.
struct RowGroup {
  int64_t first;
  int64_t count;
  int64_t offset;  // of their KV head in a row of K or V
};

template <typename F>
inline void for_each_group(const Shape& shape, F f) {
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    for (int64_t r = 0; r < shape.rows_per_head; r += 4) {
      f(RowGroup{head * shape.rows_per_head + r, std::min<int64_t>(4, shape.rows_per_head - r),
                 head * shape.dim});
    }
  }
}

// scores[row][key] = q[row] . k[key] for kRows x kKeys; every pair has its own sum.
template <int kRows, int kKeys, typename T>
inline void score_block(const float* q, int64_t dim, const T* const* keys, int64_t offset,
                        float* scores) {
  Vec8 sums[kRows][kKeys];
  for (auto& row : sums) {
    for (Vec8& sum : row) sum = zero();
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    Vec8 k[kKeys];
    for (int j = 0; j < kKeys; ++j) k[j] = load(keys[j] + offset + d);
    for (int r = 0; r < kRows; ++r) {
      const Vec8 x = load(q + r * dim + d);
      for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(x, k[j], sums[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r) store_sums<kKeys>(scores + r * kRange, sums[r]);
}

// Always inlined, as GCC drops calls to functions that do nothing but this.
template <typename T>
__attribute__((always_inline)) inline void prefetch(const T* row, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kCacheLine<T>) __builtin_prefetch(row + i, 0, 2);
}

template <int kRows, typename T>
void score_rows(const RangeData<T>& range, const Shape& shape, const TileBuffers& b,
                RowGroup group, int64_t begin, int64_t end) {
  constexpr int kKeys = kRows <= 2 ? 4 : 2;
  const float* q = b.q + group.first * shape.dim;
  float* scores = b.scores + group.first * kRange;
  int64_t j = begin;
  for (; j + kKeys <= end; j += kKeys) {
    for (int i = 0; shape.is_direct && i < kKeys; ++i) {
      prefetch(range.keys[j + i + kAhead] + group.offset, shape.dim);
    }
    score_block<kRows, kKeys>(q, shape.dim, range.keys + j, group.offset, scores + j);
  }
  for (; j < end; ++j) {
    score_block<kRows, 1>(q, shape.dim, range.keys + j, group.offset, scores + j);
  }
}

template <typename T>
void compute_scores(const RangeData<T>& range, const Shape& shape, const TileBuffers& b) {
  const auto score_group = [&](RowGroup group, int64_t chunk) {
    const int64_t* low = b.low + group.first;
    const int64_t* high = b.high + group.first;
    const int64_t begin = std::max(chunk, *std::min_element(low, low + group.count));
    const int64_t end = std::min(chunk + kChunk, *std::max_element(high, high + group.count));
    switch (group.count) {
      case 1: return score_rows<1>(range, shape, b, group, begin, end);
      case 2: return score_rows<2>(range, shape, b, group, begin, end);
      case 3: return score_rows<3>(range, shape, b, group, begin, end);
      default: return score_rows<4>(range, shape, b, group, begin, end);
    }
  };
  for (int64_t chunk = range.begin; chunk < range.end; chunk += kChunk) {
    for_each_group(shape, [&](RowGroup group) { score_group(group, chunk); });
  }
}

// Turns the scores of keys [low, high) into weights and starts the row's record. The lanes around
// them, up to a multiple of 8, get weight 0.
void softmax_row(float* scores, int64_t low, int64_t high, float softcap_at, float* record) {
  const int64_t begin = low / kLanes * kLanes;
  const int64_t end = (high + kLanes - 1) / kLanes * kLanes;
  if (softcap_at > 0.0f) {
    for (int64_t j = begin; j < end; j += kLanes) {
      store(scores + j, softcap(load(scores + j), softcap_at));
    }
  }
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  std::fill(scores + begin, scores + low, kMasked);
  std::fill(scores + high, scores + end, kMasked);
  Vec8 best = splat(kMasked);
  for (int64_t j = begin; j < end; j += kLanes) best = max(best, load(scores + j));
  const float m = max_lane(best);
  Vec8 sums = zero();
  for (int64_t j = begin; j < end; j += kLanes) {
    const Vec8 weights = exp(load(scores + j) - splat(m));
    store(scores + j, weights);
    sums = sums + weights;
  }
  record[0] = m;
  record[1] = sum(sums);
}

// o[row][column] += weights[row][key] * v[key][column], key after key, for kRows x 8 kVecs.
template <int kRows, int kVecs, bool kFetch, typename T>
inline void add_block(const float* weights, const T* const* values, int64_t offset, int64_t begin,
                      int64_t end, float* o, int64_t o_stride) {
  Vec8 sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load(o + r * o_stride + i * kLanes);
  }
  for (int64_t j = begin; j < end; ++j) {
    if constexpr (kFetch) prefetch(values[j + kAhead] + offset, 1);
    Vec8 v[kVecs];
    for (int i = 0; i < kVecs; ++i) v[i] = load(values[j] + offset + i * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec8 weight = splat(weights[r * kRange + j]);
      for (int i = 0; i < kVecs; ++i) sums[r][i] = fma(weight, v[i], sums[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) store(o + r * o_stride + i * kLanes, sums[r][i]);
  }
}

// Part of V: keys of the range, columns of a KV head.
struct Slice {
  int64_t begin;
  int64_t end;
  int64_t first_column;
  int64_t end_column;
  bool is_direct;
};

template <int kRows, typename T>
void add_rows(const float* weights, const T* const* values, int64_t offset, Slice slice, float* o,
              int64_t o_stride) {
  constexpr int kVecs = kRows <= 2 ? 8 / kRows : 2;
  if (slice.begin >= slice.end) return;
  const auto add = [&](auto vecs, auto fetch, int64_t c) {
    add_block<kRows, decltype(vecs)::value, decltype(fetch)::value>(
        weights, values, offset + c, slice.begin, slice.end, o + c, o_stride);
  };
  constexpr std::integral_constant<int, kVecs> kAll;
  int64_t c = slice.first_column;
  for (; c + kVecs * kLanes <= slice.end_column; c += kVecs * kLanes) {
    if (slice.is_direct && c % kCacheLine<T> == 0) {
      add(kAll, std::true_type(), c);
    } else {
      add(kAll, std::false_type(), c);
    }
  }
  for (; c < slice.end_column; c += kLanes) {
    add(std::integral_constant<int, 1>(), std::false_type(), c);
  }
}

// All rows of the group together where all of them see the key, else one by one: a key that a row
// does not see may hold NaN, which a weight of 0 would not keep out.
template <typename T>
void add_group(const RangeData<T>& range, const Shape& shape, const TileBuffers& b, RowGroup group,
               Slice slice, float* records) {
  const int64_t count = group.count;
  const int64_t offset = group.offset;
  const int64_t* low = b.low + group.first;
  const int64_t* high = b.high + group.first;
  const int64_t stride = shape.record();
  const float* weights = b.scores + group.first * kRange;
  float* o = records + group.first * stride + kRowHeader;
  Slice shared = slice;
  shared.end = std::max(slice.begin, std::min(slice.end, *std::min_element(high, high + count)));
  shared.begin = std::min(shared.end, std::max(slice.begin, *std::max_element(low, low + count)));
  const auto add_each = [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; begin < end && r < count; ++r) {
      const Slice seen{std::max(begin, low[r]), std::min(end, high[r]), slice.first_column,
                       slice.end_column, false};
      add_rows<1>(weights + r * kRange, range.values, offset, seen, o + r * stride, stride);
    }
  };
  add_each(slice.begin, shared.begin);
  switch (count) {
    case 1: add_rows<1>(weights, range.values, offset, shared, o, stride); break;
    case 2: add_rows<2>(weights, range.values, offset, shared, o, stride); break;
    case 3: add_rows<3>(weights, range.values, offset, shared, o, stride); break;
    default: add_rows<4>(weights, range.values, offset, shared, o, stride); break;
  }
  add_each(shared.end, slice.end);
}

template <typename T>
void add_values(const RangeData<T>& range, const Shape& shape, const TileBuffers& b,
                float* records) {
  const int64_t num_keys = shape.is_direct ? kChunk : kRange;
  const int64_t num_columns = shape.is_direct ? shape.dim : kSlice;
  for (int64_t j = range.begin; j < range.end; j += num_keys) {
    for (int64_t c = 0; c < shape.dim; c += num_columns) {
      const Slice slice{j, std::min(j + num_keys, range.end), c,
                        std::min(c + num_columns, shape.dim), shape.is_direct};
      for_each_group(shape, [&](RowGroup group) {
        add_group(range, shape, b, group, slice, records);
      });
    }
  }
}

template <typename T>
void attend_range(const RangeData<T>& range, const Shape& shape, float softcap_at,
                  const TileBuffers& b, float* records) {
  compute_scores(range, shape, b);
  for (int64_t r = 0; r < shape.num_rows(); ++r) {
    float* record = records + r * shape.record();
    std::fill(record, record + shape.record(), 0.0f);
    if (b.low[r] >= b.high[r]) continue;
    softmax_row(b.scores + r * kRange, b.low[r], b.high[r], softcap_at, record);
  }
  add_values(range, shape, b, records);
}

// Adds a range's record to the total of the ranges before it.
void merge_record(float* total, const float* partial, int64_t dim) {
  if (partial[1] == 0.0f) return;
  if (total[1] == 0.0f) {
    std::copy(partial, partial + kRowHeader + dim, total);
    return;
  }
  const float m = std::max(total[0], partial[0]);
  const float total_scale = exp(total[0] - m);
  const float partial_scale = exp(partial[0] - m);
  total[0] = m;
  total[1] = total[1] * total_scale + partial[1] * partial_scale;
  const Vec8 a = splat(total_scale);
  const Vec8 b = splat(partial_scale);
  for (int64_t i = kRowHeader; i < kRowHeader + dim; i += kLanes) {
    store(total + i, fma(load(total + i), a, load(partial + i) * b));
  }
}

int64_t first_token(const AttentionArgs& args, const Tile& tile) {
  return args.cu_seqlens_q[tile.seq] + tile.first_query;
}

int64_t first_position(const AttentionArgs& args, const Tile& tile) {
  const int64_t num_queries = args.cu_seqlens_q[tile.seq + 1] - args.cu_seqlens_q[tile.seq];
  return args.seq_lens[tile.seq] - num_queries + tile.first_query;
}

// Calls f(row, query, head) for all rows of the tile; head counts from the model's first.
template <typename F>
inline void for_each_row(const AttentionArgs& args, const Tile& tile, F f) {
  const int64_t group = heads_per_kv_head(args);
  int64_t row = 0;
  for (int64_t h = tile.first_kv_head; h < tile.first_kv_head + tile.num_kv_heads; ++h) {
    for (int64_t query = 0; query < tile.num_queries; ++query) {
      for (int64_t i = 0; i < group; ++i) f(row++, query, h * group + i);
    }
  }
}

void load_queries(const AttentionArgs& args, const Tile& tile, float* target) {
  const int64_t dim = padded_dim(args);
  const float* queries = args.q + first_token(args, tile) * args.q_token_stride;
  for_each_row(args, tile, [&](int64_t row, int64_t query, int64_t head) {
    const float* q = queries + query * args.q_token_stride + head * args.q_head_stride;
    float* scaled = target + row * dim;
    for (int64_t d = 0; d < args.head_dim; ++d) scaled[d] = q[d] * args.scale;
    std::fill(scaled + args.head_dim, scaled + dim, 0.0f);
  });
}

void write_output(const AttentionArgs& args, const Tile& tile, const float* records) {
  for_each_row(args, tile, [&](int64_t row, int64_t query, int64_t head) {
    const float* record = records + row * record_size(args);
    const int64_t token = first_token(args, tile) + query;
    float* out = args.out + (token * args.num_heads + head) * args.head_dim;
    const float inverse = 1.0f / record[1];
    for (int64_t d = 0; d < args.head_dim; ++d) out[d] = record[kRowHeader + d] * inverse;
  });
}

// Which keys of the range each row sees, as offsets within the range.
template <typename T>
void set_bounds(const AttentionArgs& args, const Tile& tile, int64_t range_idx,
                const TileBuffers& b, RangeData<T>& range) {
  const int64_t start = range_idx * kRange;
  const int64_t first = first_position(args, tile);
  range.begin = kRange;
  range.end = 0;
  for_each_row(args, tile, [&](int64_t r, int64_t query, int64_t) {
    const int64_t position = first + query;
    const int64_t low = args.sliding_window > 0 ? position - args.sliding_window + 1 : 0;
    b.low[r] = std::clamp<int64_t>(low - start, 0, kRange);
    b.high[r] = std::clamp<int64_t>(position + 1 - start, 0, kRange);
    if (b.low[r] >= b.high[r]) return;
    range.begin = std::min(range.begin, b.low[r]);
    range.end = std::max(range.end, b.high[r]);
  });
}

// Looks the range's keys up in the block table.
template <typename T>
bool locate(const AttentionArgs& args, const Tile& tile, int64_t range_idx, RangeData<T>& range) {
  const int32_t* table = args.block_tables + tile.seq * args.table_stride;
  const int64_t token_stride = args.num_kv_heads * args.head_dim;
  const int64_t head_offset = tile.first_kv_head * args.head_dim;
  int64_t j = range.begin;
  while (j < range.end) {
    const int64_t position = range_idx * kRange + j;
    const int64_t block_id = table[position / args.block_size];
    if (block_id < 0 || block_id >= args.num_blocks) return false;
    int64_t offset = position % args.block_size;
    const T* k = static_cast<const T*>(args.k_cache.data) + block_id * args.k_cache.block_stride;
    const T* v = static_cast<const T*>(args.v_cache.data) + block_id * args.v_cache.block_stride;
    for (; offset < args.block_size && j < range.end; ++offset, ++j) {
      range.keys[j] = k + offset * token_stride + head_offset;
      range.values[j] = v + offset * token_stride + head_offset;
    }
  }
  for (int64_t i = 0; i < kAhead && range.begin < range.end; ++i) {
    range.keys[range.end + i] = range.values[std::min(range.begin + i, range.end - 1)];
    range.values[range.end + i] = range.values[range.end - 1];
  }
  return true;
}

template <typename T>
void unpack_row(const T* source, int64_t count, float* target) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i));
  if (i < count) store(target + i, load_part(source + i, count - i));
}

// Unpacks the range's K and V of one KV head to float rows, padded with zeros.
template <typename T>
void unpack(const AttentionArgs& args, const RangeData<T>& range, const TileBuffers& b,
            RangeData<float>& unpacked) {
  const int64_t stride = unpacked_stride(args);
  for (int64_t j = range.begin; j < range.end; ++j) {
    unpack_row(range.keys[j], args.head_dim, b.keys + j * stride);
    unpack_row(range.values[j], args.head_dim, b.values + j * stride);
    unpacked.keys[j] = b.keys + j * stride;
    unpacked.values[j] = b.values + j * stride;
  }
  unpacked.begin = range.begin;
  unpacked.end = range.end;
}

template <typename T>
bool attend_typed(const AttentionArgs& args, const Tile& tile, int64_t begin, int64_t end,
                  const TileBuffers& b) {
  const Shape shape{padded_dim(args), tile.num_kv_heads,
                    rows_per_kv_head(args, tile.num_queries), is_direct(args, tile.num_queries)};
  const int64_t rows = shape.num_rows();
  const int64_t record = shape.record();
  load_queries(args, tile, b.q);
  for (int64_t r = 0; r < rows; ++r) b.total[r * record + 1] = 0.0f;
  for (int64_t i = begin; i < end; ++i) {
    float* records = b.partial;
    if (tile.partials != nullptr) records = tile.partials + (i - tile.first_range) * rows * record;
    RangeData<T> range;
    set_bounds(args, tile, i, b, range);
    if (!locate(args, tile, i, range)) return false;
    if (shape.is_direct) {
      attend_range(range, shape, args.logit_softcap, b, records);
    } else {
      RangeData<float> unpacked;
      unpack(args, range, b, unpacked);
      attend_range(unpacked, shape, args.logit_softcap, b, records);
    }
    if (tile.partials != nullptr) continue;
    for (int64_t r = 0; r < rows; ++r) {
      merge_record(b.total + r * record, records + r * record, shape.dim);
    }
  }
  if (tile.partials == nullptr) write_output(args, tile, b.total);
  return true;
}

template <typename T>
void pack_typed(const float* source, T* target, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i));
  if (i < count) store_part(target + i, load_part(source + i, count - i), count - i);
}

void pack(const float* source, CacheType type, void* target, int64_t count) {
  switch (type) {
    case CacheType::kFloat16: return pack_typed(source, static_cast<Half*>(target), count);
    case CacheType::kBFloat16: return pack_typed(source, static_cast<BFloat16*>(target), count);
    default: std::copy(source, source + count, static_cast<float*>(target));
  }
}

bool attend(const AttentionArgs& args, const Tile& tile, int64_t begin, int64_t end,
            const TileBuffers& buffers) {
  switch (args.cache_type) {
    case CacheType::kFloat16: return attend_typed<Half>(args, tile, begin, end, buffers);
    case CacheType::kBFloat16: return attend_typed<BFloat16>(args, tile, begin, end, buffers);
    default: return attend_typed<float>(args, tile, begin, end, buffers);
  }
}

void merge(const AttentionArgs& args, const Tile& tile, const TileBuffers& b) {
  const int64_t rows = num_rows(args, tile);
  const int64_t record = record_size(args);
  for (int64_t r = 0; r < rows; ++r) b.total[r * record + 1] = 0.0f;
  const float* partial = tile.partials;
  for (int64_t i = tile.first_range; i < tile.end_range; ++i) {
    for (int64_t r = 0; r < rows; ++r, partial += record) {
      merge_record(b.total + r * record, partial, padded_dim(args));
    }
  }
  write_output(args, tile, b.total);
}

constexpr AttentionKernels kAttentionKernels{attend, merge, pack};

}  // namespace
}  // namespace llmserve
