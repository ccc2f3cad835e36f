// The functions of AttentionKernels, included by one source file per instruction set, like vec8.h.
// Softmax over ranges as in Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018, arXiv 1805.02867, and tiles as in Dao, "FlashAttention-2", 2023, arXiv 2307.08691; unlike
// there, ranges start at fixed positions and are reduced apart from each other.
#pragma once

#include <algorithm>

#include "llmserve/attention_range.h"

namespace llmserve {
namespace {

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
