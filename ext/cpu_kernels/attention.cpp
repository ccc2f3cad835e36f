// Divides the attention of a step into tiles and, where there are too few of those to keep all
// threads busy, tiles into runs of ranges.
#include "llmserve/attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmserve/attention_tile.h"
#include "llmserve/instruction_set.h"
#include "llmserve/parallel.h"

namespace llmserve {
namespace {

// Tasks per thread that the work is divided into at least, if it has as many ranges.
constexpr int64_t kTasksPerThread = 4;
// Less than this many row-key pairs are not worth a second thread.
constexpr int64_t kMinTaskPairs = 2 * kRange;
constexpr size_t kAlignment = 64;

// Memory that grows and is kept for the next call of the same thread.
class Arena {
 public:
  float* reserve(int64_t num_floats) {
    if (num_floats > capacity_) {
      const size_t num_bytes = num_floats * sizeof(float);
      const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
      memory_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, rounded)));
      capacity_ = memory_ ? num_floats : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t capacity_ = 0;
};

class ThreadBuffers {
 public:
  const TileBuffers& reserve(const AttentionArgs& args, int64_t rows) {
    const int64_t dim = padded_dim(args);
    const int64_t unpacked = kRange * unpacked_stride(args);
    float* next = arena_.reserve(rows * (dim + kRange + 2 * record_size(args)) + 2 * unpacked);
    const auto take = [&next](int64_t num_floats) {
      float* taken = next;
      next += num_floats;
      return taken;
    };
    bounds_.resize(2 * rows);
    buffers_ = {take(rows * dim),
                take(rows * kRange),
                take(rows * record_size(args)),
                take(rows * record_size(args)),
                take(unpacked),
                take(unpacked),
                bounds_.data(),
                bounds_.data() + rows};
    return buffers_;
  }

 private:
  Arena arena_;
  std::vector<int64_t> bounds_;
  TileBuffers buffers_{};
};

struct Task {
  int64_t tile;
  int64_t begin;  // ranges
  int64_t end;
};

struct Plan {
  std::vector<Tile> tiles;
  std::vector<Task> tasks;
  std::vector<int64_t> split_tiles;
  int64_t max_rows = 0;  // of a tile
};

void check_lengths(const AttentionArgs& args) {
  if (args.cu_seqlens_q[0] != 0) throw std::invalid_argument("cu_seqlens_q must start with 0");
  if (args.cu_seqlens_q[args.num_seqs] != args.num_tokens) {
    throw std::invalid_argument("cu_seqlens_q ends with " +
                                std::to_string(args.cu_seqlens_q[args.num_seqs]) + ", but q has " +
                                std::to_string(args.num_tokens) + " tokens");
  }
  for (int64_t i = 0; i < args.num_seqs; ++i) {
    const int64_t num_queries = args.cu_seqlens_q[i + 1] - args.cu_seqlens_q[i];
    const int64_t seq_len = args.seq_lens[i];
    if (num_queries < 0) throw std::invalid_argument("cu_seqlens_q must not decrease");
    if (seq_len < num_queries || seq_len > args.max_blocks * args.block_size) {
      throw std::invalid_argument("sequence " + std::to_string(i) + " of length " +
                                  std::to_string(seq_len) + " has " + std::to_string(num_queries) +
                                  " queries and a block table for " +
                                  std::to_string(args.max_blocks * args.block_size) + " tokens");
    }
  }
}

int64_t num_queries_of(const AttentionArgs& args, int64_t seq) {
  return args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq];
}

// The queries [first, first + count) of a sequence, and the ranges they see.
Tile make_tile(const AttentionArgs& args, int64_t seq, int64_t first, int64_t count) {
  const int64_t position = args.seq_lens[seq] - num_queries_of(args, seq) + first;
  const int64_t low = args.sliding_window > 0 ? position - args.sliding_window + 1 : 0;
  Tile tile{};
  tile.seq = seq;
  tile.first_query = first;
  tile.num_queries = count;
  tile.first_range = std::max<int64_t>(0, low) / kRange;
  tile.end_range = (position + count - 1) / kRange + 1;
  return tile;
}

// Late tiles first: they see the most keys, and threads should run out of work at the same time.
void add_tiles(const AttentionArgs& args, int64_t seq, int64_t kv_heads_per_tile, Plan& plan) {
  const int64_t num_queries = num_queries_of(args, seq);
  const int64_t step = std::max<int64_t>(1, kMaxHeadRows / heads_per_kv_head(args));
  for (int64_t i = (num_queries + step - 1) / step - 1; i >= 0; --i) {
    Tile tile = make_tile(args, seq, i * step, std::min(step, num_queries - i * step));
    const int64_t num_kv_heads = is_direct(args, tile.num_queries) ? kv_heads_per_tile : 1;
    for (int64_t head = 0; head < args.num_kv_heads; head += num_kv_heads) {
      tile.first_kv_head = head;
      tile.num_kv_heads = std::min(num_kv_heads, args.num_kv_heads - head);
      plan.max_rows = std::max(plan.max_rows, num_rows(args, tile));
      plan.tiles.push_back(tile);
    }
  }
}

// All, unless the ranges of the sequences are too few to keep all threads busy.
int64_t choose_kv_heads_per_tile(const AttentionArgs& args, int64_t num_tasks) {
  int64_t num_ranges = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    if (num_queries_of(args, seq) == 0) continue;
    const Tile last = make_tile(args, seq, num_queries_of(args, seq) - 1, 1);
    num_ranges += last.end_range - last.first_range;
  }
  return std::clamp<int64_t>(args.num_kv_heads * num_ranges / num_tasks, 1, args.num_kv_heads);
}

Plan make_plan(const AttentionArgs& args, int num_threads) {
  Plan plan;
  const int64_t num_tasks = num_threads > 1 ? kTasksPerThread * num_threads : 1;
  const int64_t kv_heads_per_tile = choose_kv_heads_per_tile(args, num_tasks);
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    add_tiles(args, seq, kv_heads_per_tile, plan);
  }
  int64_t num_pairs = 0;
  for (const Tile& tile : plan.tiles) {
    num_pairs += (tile.end_range - tile.first_range) * num_rows(args, tile) * kRange;
  }
  const int64_t task_pairs = std::max(kMinTaskPairs, num_pairs / num_tasks);
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const Tile& tile = plan.tiles[i];
    const int64_t num_ranges = tile.end_range - tile.first_range;
    const int64_t step =
        std::clamp<int64_t>(task_pairs / (num_rows(args, tile) * kRange), 1, num_ranges);
    for (int64_t begin = tile.first_range; begin < tile.end_range; begin += step) {
      const int64_t end = std::min(begin + step, tile.end_range);
      plan.tasks.push_back({static_cast<int64_t>(i), begin, end});
    }
    if (step < num_ranges) plan.split_tiles.push_back(static_cast<int64_t>(i));
  }
  return plan;
}

void place_partials(const AttentionArgs& args, Plan& plan, Arena& arena) {
  const auto size = [&](const Tile& tile) {
    return (tile.end_range - tile.first_range) * num_rows(args, tile) * record_size(args);
  };
  int64_t total = 0;
  for (int64_t i : plan.split_tiles) total += size(plan.tiles[i]);
  float* next = arena.reserve(total);
  for (int64_t i : plan.split_tiles) {
    plan.tiles[i].partials = next;
    next += size(plan.tiles[i]);
  }
}

// Calls f(i, buffers) for all i below n, handed out one by one.
template <typename F>
void for_each(const AttentionArgs& args, const Plan& plan, int64_t n, int num_threads, F f) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>(n, num_threads), 1, [&](int64_t, int64_t) {
    thread_local ThreadBuffers thread_buffers;
    const TileBuffers& buffers = thread_buffers.reserve(args, plan.max_rows);
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) f(i, buffers);
  });
}

}  // namespace

const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
  if (get_instruction_set() >= InstructionSet::kAvx2) return attention_kernels_avx2();
#endif
  return attention_kernels_portable();
}

void paged_attention(const AttentionArgs& args) {
  check_lengths(args);
  const AttentionKernels& kernels = attention_kernels();
  const int num_threads = get_num_threads();
  Plan plan = make_plan(args, num_threads);
  thread_local Arena partials;
  place_partials(args, plan, partials);
  std::atomic<bool> is_ok{true};
  const int64_t num_tasks = static_cast<int64_t>(plan.tasks.size());
  for_each(args, plan, num_tasks, num_threads, [&](int64_t i, const TileBuffers& buffers) {
    const Task& task = plan.tasks[i];
    if (!kernels.attend(args, plan.tiles[task.tile], task.begin, task.end, buffers)) is_ok = false;
  });
  if (!is_ok) throw std::out_of_range("a block table names a block that does not exist");
  const int64_t num_split = static_cast<int64_t>(plan.split_tiles.size());
  for_each(args, plan, num_split, num_threads, [&](int64_t i, const TileBuffers& buffers) {
    kernels.merge(args, plan.tiles[plan.split_tiles[i]], buffers);
  });
}

}  // namespace llmserve
