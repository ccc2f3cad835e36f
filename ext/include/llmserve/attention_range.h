// One range of keys and the rows of a tile: scores, softmax, weighted sum of values. Included by
// attention_body.h.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "llmserve/attention_tile.h"
#include "llmserve/vec_math.h"

namespace llmserve {
namespace {

constexpr int64_t kChunk = 16;      // keys that stay in the first-level cache
constexpr int64_t kSlice = 32;      // columns of V that do, for a whole range
template <typename T>
constexpr int64_t kCacheLine = 64 / static_cast<int64_t>(sizeof(T));  // elements
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
    if constexpr (kFetch) prefetch(values[j + kAhead] + offset, kVecs * kLanes);
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
  bool is_fetched;  // kAhead keys before it is needed
};

template <int kRows, typename T>
void add_rows(const float* weights, const T* const* values, int64_t offset, Slice slice, float* o,
              int64_t o_stride) {
  constexpr int kVecs = kRows <= 2 ? 8 / kRows : 2;
  if (slice.begin >= slice.end) return;
  const auto add = [&](auto vecs, int64_t c) {
    constexpr int kCount = decltype(vecs)::value;
    if (slice.is_fetched && c % kCacheLine<T> == 0) {
      add_block<kRows, kCount, true>(weights, values, offset + c, slice.begin, slice.end, o + c,
                                     o_stride);
    } else {
      add_block<kRows, kCount, false>(weights, values, offset + c, slice.begin, slice.end, o + c,
                                      o_stride);
    }
  };
  int64_t c = slice.first_column;
  for (; c + kVecs * kLanes <= slice.end_column; c += kVecs * kLanes) {
    add(std::integral_constant<int, kVecs>(), c);
  }
  for (; c < slice.end_column; c += kLanes) add(std::integral_constant<int, 1>(), c);
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

}  // namespace
}  // namespace llmserve
