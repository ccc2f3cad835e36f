// The functions of AttentionKernels, included by one source file per instruction set, like vec8.h.
// Softmax over ranges as in Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018, arXiv 1805.02867, and tiles as in Dao, "FlashAttention-2", 2023, arXiv 2307.08691; unlike
// there, ranges start at fixed positions and are reduced apart from each other.
#pragma once

#include <algorithm>
#include <limits>

#include "llmserve/attention_tile.h"
#include "llmserve/vec_math.h"

namespace llmserve {
namespace {

constexpr int64_t kDirectRows = 8;  // tiles of at most so many rows read the cache as it is
constexpr int64_t kChunk = 16;      // keys that stay in the first-level cache
constexpr int64_t kSlice = 32;      // columns of V that do, for a whole range

template <typename T>
struct RangeData {
  const T* keys[kRange];
  const T* values[kRange];
  int64_t begin;  // keys of the range that any row sees
  int64_t end;
};

// scores[row][key] = q[row] . k[key] for kRows x kKeys; every pair has its own sum.
template <int kRows, int kKeys, typename T>
inline void score_block(const float* q, int64_t dim, const T* const* keys, float* scores) {
  Vec8 sums[kRows][kKeys];
  for (auto& row : sums) {
    for (Vec8& sum : row) sum = zero();
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    Vec8 k[kKeys];
    for (int j = 0; j < kKeys; ++j) k[j] = load(keys[j] + d);
    for (int r = 0; r < kRows; ++r) {
      const Vec8 x = load(q + r * dim + d);
      for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(x, k[j], sums[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r) store_sums<kKeys>(scores + r * kRange, sums[r]);
}

template <int kRows, typename T>
void score_rows(const float* q, int64_t dim, const T* const* keys, int64_t begin, int64_t end,
                float* scores) {
  constexpr int kKeys = kRows <= 2 ? 4 : 2;
  int64_t j = begin;
  for (; j + kKeys <= end; j += kKeys) {
    score_block<kRows, kKeys>(q, dim, keys + j, scores + j);
  }
  for (; j < end; ++j) score_block<kRows, 1>(q, dim, keys + j, scores + j);
}

template <typename T>
void compute_scores(const RangeData<T>& range, int64_t rows, int64_t dim, const TileBuffers& b) {
  for (int64_t chunk = range.begin; chunk < range.end; chunk += kChunk) {
    for (int64_t r = 0; r < rows; r += 4) {
      const int64_t count = std::min<int64_t>(4, rows - r);
      const int64_t low = *std::min_element(b.low + r, b.low + r + count);
      const int64_t high = *std::max_element(b.high + r, b.high + r + count);
      const int64_t begin = std::max(chunk, low);
      const int64_t end = std::min(chunk + kChunk, high);
      const float* q = b.q + r * dim;
      float* scores = b.scores + r * kRange;
      switch (count) {
        case 1: score_rows<1>(q, dim, range.keys, begin, end, scores); break;
        case 2: score_rows<2>(q, dim, range.keys, begin, end, scores); break;
        case 3: score_rows<3>(q, dim, range.keys, begin, end, scores); break;
        default: score_rows<4>(q, dim, range.keys, begin, end, scores); break;
      }
    }
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
template <int kRows, int kVecs, typename T>
inline void add_block(const float* weights, const T* const* values, int64_t begin, int64_t end,
                      int64_t column, float* o, int64_t o_stride) {
  Vec8 sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load(o + r * o_stride + column + i * kLanes);
  }
  for (int64_t j = begin; j < end; ++j) {
    Vec8 v[kVecs];
    for (int i = 0; i < kVecs; ++i) v[i] = load(values[j] + column + i * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec8 weight = splat(weights[r * kRange + j]);
      for (int i = 0; i < kVecs; ++i) sums[r][i] = fma(weight, v[i], sums[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) store(o + r * o_stride + column + i * kLanes, sums[r][i]);
  }
}

struct Columns {
  int64_t begin;
  int64_t end;
};

template <int kRows, typename T>
void add_rows(const float* weights, const T* const* values, int64_t begin, int64_t end,
              Columns columns, float* o, int64_t o_stride) {
  constexpr int kVecs = kRows <= 2 ? 8 / kRows : 2;
  if (begin >= end) return;
  int64_t c = columns.begin;
  for (; c + kVecs * kLanes <= columns.end; c += kVecs * kLanes) {
    add_block<kRows, kVecs>(weights, values, begin, end, c, o, o_stride);
  }
  for (; c < columns.end; c += kLanes) {
    add_block<kRows, 1>(weights, values, begin, end, c, o, o_stride);
  }
}

// Up to four rows together where all of them see the key, else one by one: a key that a row does
// not see may hold NaN, which a weight of 0 would not keep out.
template <typename T>
void add_row_group(const RangeData<T>& range, const TileBuffers& b, int64_t first_row,
                   int64_t count, int64_t chunk, int64_t chunk_end, Columns columns,
                   float* records, int64_t record) {
  const int64_t* low = b.low + first_row;
  const int64_t* high = b.high + first_row;
  const float* weights = b.scores + first_row * kRange;
  float* o = records + first_row * record + kRowHeader;
  const int64_t shared_end =
      std::max(chunk, std::min(chunk_end, *std::min_element(high, high + count)));
  const int64_t shared_begin =
      std::min(shared_end, std::max(chunk, *std::max_element(low, low + count)));
  const auto add_each = [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < count; ++r) {
      add_rows<1>(weights + r * kRange, range.values, std::max(begin, low[r]),
                  std::min(end, high[r]), columns, o + r * record, record);
    }
  };
  add_each(chunk, shared_begin);
  switch (count) {
    case 1: add_rows<1>(weights, range.values, shared_begin, shared_end, columns, o, record); break;
    case 2: add_rows<2>(weights, range.values, shared_begin, shared_end, columns, o, record); break;
    case 3: add_rows<3>(weights, range.values, shared_begin, shared_end, columns, o, record); break;
    default: add_rows<4>(weights, range.values, shared_begin, shared_end, columns, o, record);
  }
  add_each(shared_end, chunk_end);
}

template <typename T>
void add_values(const RangeData<T>& range, int64_t rows, int64_t dim, const TileBuffers& b,
                float* records) {
  const bool is_direct = rows <= kDirectRows;
  const int64_t chunk_size = is_direct ? kChunk : kRange;
  const int64_t slice_size = is_direct ? dim : kSlice;
  const int64_t record = kRowHeader + dim;
  for (int64_t chunk = range.begin; chunk < range.end; chunk += chunk_size) {
    const int64_t chunk_end = std::min(chunk + chunk_size, range.end);
    for (int64_t c = 0; c < dim; c += slice_size) {
      const Columns columns{c, std::min(c + slice_size, dim)};
      for (int64_t r = 0; r < rows; r += 4) {
        const int64_t count = std::min<int64_t>(4, rows - r);
        add_row_group(range, b, r, count, chunk, chunk_end, columns, records, record);
      }
    }
  }
}

template <typename T>
void attend_range(const AttentionArgs& args, const RangeData<T>& range, int64_t rows,
                  const TileBuffers& b, float* records) {
  const int64_t dim = padded_dim(args);
  compute_scores(range, rows, dim, b);
  for (int64_t r = 0; r < rows; ++r) {
    float* record = records + r * (kRowHeader + dim);
    std::fill(record, record + kRowHeader + dim, 0.0f);
    if (b.low[r] >= b.high[r]) continue;
    softmax_row(b.scores + r * kRange, b.low[r], b.high[r], args.logit_softcap, record);
  }
  add_values(range, rows, dim, b, records);
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

void load_queries(const AttentionArgs& args, const Tile& tile, float* target) {
  const int64_t group = heads_per_kv_head(args);
  const int64_t dim = padded_dim(args);
  for (int64_t r = 0; r < num_rows(args, tile); ++r, target += dim) {
    const int64_t head = tile.kv_head * group + r % group;
    const float* q = args.q + (first_token(args, tile) + r / group) * args.q_token_stride +
                     head * args.q_head_stride;
    for (int64_t d = 0; d < args.head_dim; ++d) target[d] = q[d] * args.scale;
    std::fill(target + args.head_dim, target + dim, 0.0f);
  }
}

void write_output(const AttentionArgs& args, const Tile& tile, const float* records) {
  const int64_t group = heads_per_kv_head(args);
  for (int64_t r = 0; r < num_rows(args, tile); ++r, records += record_size(args)) {
    const int64_t head = tile.kv_head * group + r % group;
    const int64_t token = first_token(args, tile) + r / group;
    float* out = args.out + (token * args.num_heads + head) * args.head_dim;
    const float inverse = 1.0f / records[1];
    for (int64_t d = 0; d < args.head_dim; ++d) out[d] = records[kRowHeader + d] * inverse;
  }
}

// Which keys of the range each row sees, as offsets within the range.
template <typename T>
void set_bounds(const AttentionArgs& args, const Tile& tile, int64_t range_idx,
                const TileBuffers& b, RangeData<T>& range) {
  const int64_t group = heads_per_kv_head(args);
  const int64_t start = range_idx * kRange;
  range.begin = kRange;
  range.end = 0;
  for (int64_t r = 0; r < num_rows(args, tile); ++r) {
    const int64_t position = first_position(args, tile) + r / group;
    const int64_t low = args.sliding_window > 0 ? position - args.sliding_window + 1 : 0;
    b.low[r] = std::clamp<int64_t>(low - start, 0, kRange);
    b.high[r] = std::clamp<int64_t>(position + 1 - start, 0, kRange);
    if (b.low[r] >= b.high[r]) continue;
    range.begin = std::min(range.begin, b.low[r]);
    range.end = std::max(range.end, b.high[r]);
  }
}

// Looks the range's keys up in the block table.
template <typename T>
bool locate(const AttentionArgs& args, const Tile& tile, int64_t range_idx, RangeData<T>& range) {
  const int32_t* table = args.block_tables + tile.seq * args.table_stride;
  const int64_t token_stride = args.num_kv_heads * args.head_dim;
  const int64_t head_offset = tile.kv_head * args.head_dim;
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
  return true;
}

template <typename T>
void unpack_row(const T* source, int64_t count, float* target) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i));
  if (i < count) store(target + i, load_part(source + i, count - i));
}

// Unpacks the range's K and V to float rows, padded with zeros.
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
  const int64_t rows = num_rows(args, tile);
  const int64_t record = record_size(args);
  const bool is_direct = rows <= kDirectRows && args.head_dim % kLanes == 0;
  load_queries(args, tile, b.q);
  for (int64_t r = 0; r < rows; ++r) b.total[r * record + 1] = 0.0f;
  for (int64_t i = begin; i < end; ++i) {
    float* records = b.partial;
    if (tile.partials != nullptr) records = tile.partials + (i - tile.first_range) * rows * record;
    RangeData<T> range;
    set_bounds(args, tile, i, b, range);
    if (!locate(args, tile, i, range)) return false;
    if (is_direct) {
      attend_range(args, range, rows, b, records);
    } else {
      RangeData<float> unpacked;
      unpack(args, range, b, unpacked);
      attend_range(args, unpacked, rows, b, records);
    }
    if (tile.partials != nullptr) continue;
    for (int64_t r = 0; r < rows; ++r) {
      merge_record(b.total + r * record, records + r * record, padded_dim(args));
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
