// Writing K and V of a step to the cache, and copying blocks.
#include <cstring>
#include <stdexcept>
#include <string>

#include "llmserve/attention.h"
#include "llmserve/attention_tile.h"
#include "llmserve/parallel.h"

namespace llmserve {
namespace {

constexpr int64_t kValuesPerTask = 1 << 15;

int64_t slot_of(const WriteKVArgs& args, int64_t token) {
  if (args.is_slot_int64) return static_cast<const int64_t*>(args.slot_mapping)[token];
  return static_cast<const int32_t*>(args.slot_mapping)[token];
}

void check_slots(const WriteKVArgs& args) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t slot = slot_of(args, token);
    if (slot >= -1 && slot < num_slots) continue;
    throw std::out_of_range("slot " + std::to_string(slot) + " of token " + std::to_string(token) +
                            " does not exist; the cache has " + std::to_string(num_slots));
  }
}

void check_block(int64_t block_id, int64_t num_blocks) {
  if (block_id >= 0 && block_id < num_blocks) return;
  throw std::out_of_range("block " + std::to_string(block_id) + " does not exist; the cache has " +
                          std::to_string(num_blocks));
}

}  // namespace

void write_kv(const WriteKVArgs& args) {
  check_slots(args);
  const AttentionKernels& kernels = attention_kernels();
  const int64_t item_bytes = args.cache_type == CacheType::kFloat32 ? 4 : 2;
  const auto write = [&](const float* source, const CacheView& cache, int64_t slot, int64_t head) {
    const int64_t offset = slot % args.block_size * args.num_kv_heads + head;
    const int64_t element =
        slot / args.block_size * cache.block_stride + offset * args.head_dim;
    char* target = static_cast<char*>(cache.data) + element * item_bytes;
    kernels.pack(source, args.cache_type, target, args.head_dim);
  };
  const int64_t grain = 1 + kValuesPerTask / (args.num_kv_heads * args.head_dim);
  parallel_for(args.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slot_of(args, token);
      if (slot == -1) continue;
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        write(args.k + token * args.k_token_stride + head * args.k_head_stride, args.k_cache, slot,
              head);
        write(args.v + token * args.v_token_stride + head * args.v_head_stride, args.v_cache, slot,
              head);
      }
    }
  });
}

void copy_blocks(void* cache, int64_t block_stride_bytes, int64_t block_bytes, int64_t num_blocks,
                 const std::vector<std::pair<int64_t, int64_t>>& block_copies) {
  for (const auto& [source, target] : block_copies) {
    check_block(source, num_blocks);
    check_block(target, num_blocks);
  }
  char* blocks = static_cast<char*>(cache);
  for (const auto& [source, target] : block_copies) {
    std::memmove(blocks + target * block_stride_bytes, blocks + source * block_stride_bytes,
                 block_bytes);
  }
}

}  // namespace llmserve
