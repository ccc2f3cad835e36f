// Pool of fixed-size KV cache blocks: reference counts, eviction order and the prefix cache map.
//
// Every operation costs O(1) per block. llmserve/kvcache/block_pool.py describes the rules and
// holds the readable twin, which gives out the same blocks in the same order.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace llmserve {

constexpr int32_t kNullBlock = 0;
constexpr size_t kBlockHashBytes = 32;

using BlockHash = std::array<uint8_t, kBlockHashBytes>;

class BlockPool {
 public:
  // Blocks 1..num_blocks-1 can be given out; block 0 is the null block.
  explicit BlockPool(int32_t num_blocks) : num_blocks_(num_blocks) {
    if (num_blocks < 2) throw std::invalid_argument("a pool needs the null block and one more");
    blocks_.resize(num_blocks);
    for (int32_t id = 0; id < num_blocks; ++id) {
      blocks_[id].prev = (id == 0 ? num_blocks : id) - 1;
      blocks_[id].next = id + 1 == num_blocks ? 0 : id + 1;
    }
    num_free_ = num_blocks - 1;
    size_t num_buckets = 1;
    while (num_buckets < blocks_.size()) num_buckets *= 2;
    buckets_.assign(num_buckets, kNullBlock);
  }

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return num_free_; }
  int64_t num_cached() const { return num_cached_; }
  int32_t ref_count(int32_t id) const { return checked(id).ref_count; }

  // Null if the block has no hash.
  const BlockHash* hash(int32_t id) const {
    const Block& block = checked(id);
    return block.is_cached ? &block.key.hash : nullptr;
  }

  // Writes the next n blocks in eviction order to out, with one reference each and no hash.
  // Throws std::invalid_argument, with nothing changed, if fewer are free.
  void allocate(int64_t n, int32_t* out) {
    if (n < 0 || n > num_free_) throw std::invalid_argument("not enough free blocks");
    for (int64_t i = 0; i < n; ++i) {
      const int32_t id = blocks_[kNullBlock].next;
      unlink(id);
      drop_hash(id);
      blocks_[id].ref_count = 1;
      out[i] = id;
    }
  }

  // Gives back one reference to a block. The null block is ignored.
  void release(int32_t id) {
    if (id == kNullBlock) return;
    Block& block = checked(id);
    if (block.ref_count == 0) throw std::logic_error("block " + std::to_string(id) + " is free");
    if (--block.ref_count > 0) return;
    // Before the first block in line, or behind the last.
    link(id, block.is_cached ? kNullBlock : blocks_[kNullBlock].next);
  }

  // Takes one more reference to a block that is in use or cached. The null block is ignored.
  void acquire(int32_t id) {
    if (id == kNullBlock) return;
    Block& block = checked(id);
    if (block.ref_count == 0) {
      if (!block.is_cached) {
        throw std::logic_error("block " + std::to_string(id) + " is free and not cached");
      }
      unlink(id);
    }
    ++block.ref_count;
  }

  // Makes a block that is in use findable. Does nothing for the null block, for a block that has a
  // hash, and where another block holds the same content.
  void insert(const BlockHash& hash, int32_t group, int32_t id) {
    if (id == kNullBlock) return;
    Block& block = checked(id);
    if (block.ref_count == 0) throw std::logic_error("block " + std::to_string(id) + " is free");
    if (block.is_cached) return;
    if (find(hash, group) != kNullBlock) return;
    block.key = Key{hash, group};
    block.is_cached = true;
    int32_t& first = bucket(block.key);
    block.next_in_bucket = first;
    first = id;
    ++num_cached_;
  }

  // The null block if there is none.
  int32_t find(const BlockHash& hash, int32_t group) const {
    const Key key{hash, group};
    int32_t id = buckets_[bucket_index(key)];
    while (id != kNullBlock && !(blocks_[id].key == key)) id = blocks_[id].next_in_bucket;
    return id;
  }

  // No block is findable any more; references and eviction order stay.
  void reset_cache() {
    for (Block& block : blocks_) block.is_cached = false;
    buckets_.assign(buckets_.size(), kNullBlock);
    num_cached_ = 0;
  }

  // Free blocks, next one to be given out first.
  std::vector<int32_t> free_order() const {
    std::vector<int32_t> order;
    for (int32_t id = blocks_[kNullBlock].next; id != kNullBlock; id = blocks_[id].next) {
      order.push_back(id);
      if (order.size() > blocks_.size()) throw std::logic_error("the free list has a cycle");
    }
    return order;
  }

  // Throws std::logic_error if the free list, the counts and the map contradict one another.
  void check_integrity() const {
    const std::vector<int32_t> order = free_order();
    std::vector<bool> is_free(blocks_.size(), false);
    bool cached_seen = false;
    for (int32_t id : order) {
      const Block& block = blocks_[id];
      require(block.ref_count == 0 && !is_free[id], "a listed block is in use or listed twice");
      require(blocks_[block.prev].next == id && blocks_[block.next].prev == id, "broken links");
      require(block.is_cached || !cached_seen, "a block without a hash stands behind cached ones");
      cached_seen = block.is_cached;
      is_free[id] = true;
    }
    require(static_cast<int32_t>(order.size()) == num_free_, "num_free is wrong");
    int64_t num_cached_blocks = 0;
    for (int32_t id = 1; id < num_blocks_; ++id) {
      const Block& block = blocks_[id];
      require(is_free[id] == (block.ref_count == 0), "an unlisted block has no reference");
      if (!block.is_cached) continue;
      ++num_cached_blocks;
      require(find(block.key.hash, block.key.group) == id, "a hash leads to another block");
    }
    require(num_cached_blocks == num_cached(), "the map holds blocks without a hash");
  }

 private:
  struct Key {
    BlockHash hash;
    int32_t group;
    bool operator==(const Key& other) const { return group == other.group && hash == other.hash; }
  };

  // The free list is a ring through the null block: its next is the first to be given out.
  struct Block {
    int32_t prev = 0;
    int32_t next = 0;
    int32_t ref_count = 0;
    int32_t next_in_bucket = 0;  // if cached; the null block ends the chain
    bool is_cached = false;
    Key key{};
  };

  static void require(bool condition, const char* message) {
    if (!condition) throw std::logic_error(message);
  }

  const Block& checked(int32_t id) const {
    if (id < 0 || id >= num_blocks_) {
      throw std::out_of_range("there is no block " + std::to_string(id));
    }
    return blocks_[id];
  }
  Block& checked(int32_t id) {
    return const_cast<Block&>(static_cast<const BlockPool*>(this)->checked(id));
  }

  void unlink(int32_t id) {
    Block& block = blocks_[id];
    blocks_[block.prev].next = block.next;
    blocks_[block.next].prev = block.prev;
    --num_free_;
  }

  // Puts a block into the free list, before `next`.
  void link(int32_t id, int32_t next) {
    Block& block = blocks_[id];
    block.next = next;
    block.prev = blocks_[next].prev;
    blocks_[block.prev].next = id;
    blocks_[next].prev = id;
    ++num_free_;
  }

  void drop_hash(int32_t id) {
    Block& block = blocks_[id];
    if (!block.is_cached) return;
    int32_t* at = &bucket(block.key);
    while (*at != id) at = &blocks_[*at].next_in_bucket;
    *at = block.next_in_bucket;
    block.is_cached = false;
    --num_cached_;
  }

  // Block hashes are uniform already: any of their bytes will do.
  size_t bucket_index(const Key& key) const {
    uint64_t bits;
    std::memcpy(&bits, key.hash.data(), sizeof(bits));
    bits += static_cast<uint64_t>(key.group) * 0x9E3779B97F4A7C15u;
    return bits & (buckets_.size() - 1);
  }
  int32_t& bucket(const Key& key) { return buckets_[bucket_index(key)]; }

  int32_t num_blocks_;
  int32_t num_free_ = 0;
  int64_t num_cached_ = 0;
  std::vector<Block> blocks_;
  std::vector<int32_t> buckets_;  // prefix cache: hash table of chains through the blocks
};

}  // namespace llmserve
