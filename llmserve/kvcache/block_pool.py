"""The pool of KV cache blocks: who holds one, which is reused next, which content can be found.

Rules, for the C++ pool and for its readable twin PyBlockPool alike:

* Block 0 is the null block: never given out, ignored wherever block ids are passed in.
* A block with references is in use. One without is free, and stands in the eviction order.
* A block in use can be given a (hash, group); then it is cached: it can be found, also after it
  became free, until it is given out again (evicted) and so loses the hash.
* Eviction order: free blocks without a hash first, the last one freed first, for nothing is lost
  with them; then cached blocks, the one free for the longest time first. Blocks freed in one call
  are freed from the end of the list to its beginning, so that of a chain of blocks the end is
  evicted before the beginning, without which it could not be found.
"""

from __future__ import annotations

from typing import TypeAlias

from llmserve.env import NO_EXT
from llmserve.kvcache.prefix import BLOCK_HASH_BYTES, BlockHash

try:
    from llmserve import _block_allocator
except ImportError:  # not compiled: PyBlockPool serves
    _HAS_EXT = False
else:
    _HAS_EXT = True

NULL_BLOCK = 0


class PyBlockPool:
    """The pool in Python. Every operation costs O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError below 2."""
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and one more")
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._plain = list(range(num_blocks - 1, 0, -1))  # free, no hash; a stack
        self._evictable: dict[int, None] = {}  # free, cached; oldest first
        self._keys: dict[int, tuple[BlockHash, int]] = {}  # block -> (hash, group)
        self._blocks: dict[tuple[BlockHash, int], int] = {}  # (hash, group) -> block

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._keys)

    def allocate(self, n: int) -> list[int]:
        """The next n blocks in eviction order, one reference each.

        Raises ValueError, with nothing changed, if fewer are free.
        """
        if not 0 <= n <= self.num_free:
            raise ValueError("not enough free blocks")
        return [self._allocate_one() for _ in range(n)]

    def _allocate_one(self) -> int:
        if self._plain:
            block_id = self._plain.pop()
        else:
            block_id = next(iter(self._evictable))
            del self._evictable[block_id]
            del self._blocks[self._keys.pop(block_id)]
        self._ref_counts[block_id] = 1
        return block_id

    def free(self, block_ids: list[int]) -> None:
        """Gives back one reference to each, last block first. RuntimeError for a free block."""
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            if self.ref_count(block_id) == 0:
                raise RuntimeError(f"block {block_id} is free")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._keys:
                self._evictable[block_id] = None
            else:
                self._plain.append(block_id)

    def touch(self, block_ids: list[int]) -> None:
        """Takes one more reference to each. RuntimeError for one that is free and not cached."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self.ref_count(block_id) == 0:
                if block_id not in self._evictable:
                    raise RuntimeError(f"block {block_id} is free and not cached")
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def count_free(self, block_ids: list[int]) -> int:
        """How many of these (distinct) blocks are free: what touching them takes from the pool."""
        return sum(1 for i in block_ids if i != NULL_BLOCK and self.ref_count(i) == 0)

    def cache(self, block_hash: BlockHash, block_ids: list[int]) -> None:
        """Makes `block_ids[group]` findable under `block_hash` for every group.

        Skips blocks that have a hash, and content that another block holds already. RuntimeError
        for a free block.
        """
        _check_hash(block_hash)
        for group, block_id in enumerate(block_ids):
            if block_id == NULL_BLOCK:
                continue
            if self.ref_count(block_id) == 0:
                raise RuntimeError(f"block {block_id} is free")
            key = (block_hash, group)
            if block_id not in self._keys and key not in self._blocks:
                self._keys[block_id] = key
                self._blocks[key] = block_id

    def lookup(self, block_hashes: list[BlockHash], group: int) -> list[int]:
        """The cached block for each hash, the null block where there is none."""
        for block_hash in block_hashes:
            _check_hash(block_hash)
        return [self._blocks.get((block_hash, group), NULL_BLOCK) for block_hash in block_hashes]

    def reset_cache(self) -> None:
        """No block can be found any more; references and eviction order stay. O(num_blocks)."""
        self._plain[:0] = reversed(self._evictable)
        self._evictable.clear()
        self._keys.clear()
        self._blocks.clear()

    def ref_count(self, block_id: int) -> int:
        """IndexError if there is no such block."""
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"there is no block {block_id}")
        return self._ref_counts[block_id]

    def hash_of(self, block_id: int) -> BlockHash | None:
        self.ref_count(block_id)
        key = self._keys.get(block_id)
        return key[0] if key else None

    def free_order(self) -> list[int]:
        """Free blocks, next one to be given out first. O(num_blocks)."""
        return [*reversed(self._plain), *self._evictable]

    def check_integrity(self) -> None:
        """RuntimeError if free blocks, counts and map contradict one another. O(num_blocks)."""
        order = self.free_order()
        unused = {i for i in range(1, self._num_blocks) if self._ref_counts[i] == 0}
        is_sound = (
            len(order) == len(set(order))
            and set(order) == unused
            and not any(i in self._keys for i in self._plain)
            and all(i in self._keys for i in self._evictable)
            and {key: i for i, key in self._keys.items()} == self._blocks
        )
        if not is_sound:
            raise RuntimeError("free blocks, reference counts and cache contradict one another")


BlockPool: TypeAlias = "_block_allocator.BlockPool | PyBlockPool"


def _check_hash(block_hash: BlockHash) -> None:
    if len(block_hash) != BLOCK_HASH_BYTES:
        raise ValueError("a block hash is 32 bytes")


def make_block_pool(num_blocks: int) -> BlockPool:
    """The C++ pool where it is compiled and not switched off, else the twin."""
    if _HAS_EXT and not NO_EXT:
        return _block_allocator.BlockPool(num_blocks)
    return PyBlockPool(num_blocks)
