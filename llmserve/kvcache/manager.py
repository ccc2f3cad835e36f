"""Block tables of sequences: allocation, sliding windows, prefix cache, forks.

Owns which block holds which tokens of which sequence. All KV cache groups draw from one pool; the
tables of a sequence's groups have equal lengths and are indexed by position. In a group with a
window, entries that no later token can see are the null block. Knows no queues and no steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llmserve.core import KVCacheSpec, Request
from llmserve.core.capacity import max_blocks_per_sequence
from llmserve.kvcache.block_pool import NULL_BLOCK, make_block_pool
from llmserve.kvcache.prefix import BlockHash, extend_block_hashes, num_usable_blocks

BlockIds = tuple[list[int], ...]  # one list per group


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the prefix cache holds of a sequence's beginning; nothing is reserved yet."""

    num_tokens: int
    block_ids: BlockIds  # null where a window needs no block


@dataclass(slots=True)
class SequenceBlocks:
    """Invariant: a table covers exactly the tokens computed or scheduled, in whole blocks."""

    tables: BlockIds
    num_cached: int  # first blocks of the tables that went through the prefix cache
    num_dropped: list[int]  # per window: first entries of its tables that are null


class KVCacheManager:
    """Invariants, checked by check_integrity():

    * a block's reference count is the number of tables that hold it;
    * a block that a sequence may still write to has one holder;
    * only full blocks of finished steps have a hash.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_blocks: int,
        max_step_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        """`num_blocks` counts the null block; `max_step_tokens` is the longest chunk of a step."""
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens
        self.pool = make_block_pool(num_blocks)
        self._spec = spec
        self._block_size = spec.block_size
        self._max_step_tokens = max_step_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._num_groups = len(spec.groups)
        windows = [group.sliding_window for group in spec.groups]
        self._windows = [  # (window, its groups)
            (window, [g for g, other in enumerate(windows) if other == window])
            for window in sorted({window for window in windows if window is not None})
        ]
        self._num_needed = [  # blocks before a block boundary that the next token sees
            None if window is None else -(-(window - 1) // spec.block_size) for window in windows
        ]
        self._blocks: dict[str, SequenceBlocks] = {}
        self._hashes: dict[str, list[BlockHash]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, 0 to 1; cached blocks nobody holds are free."""
        return 1.0 - self.pool.num_free / (self.pool.num_blocks - 1)

    def block_ids(self, request_id: str) -> BlockIds:
        """Copies of a sequence's block tables. KeyError if it holds none."""
        return tuple(list(table) for table in self._blocks[request_id].tables)

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """The longest cached beginning of a sequence, in whole blocks and short of its last token.

        Empty for a sequence that wants prompt logprobs, which cached tokens cannot give.
        """
        num_full = (request.num_tokens - 1) // self._block_size
        asks_prompt = request.sampling.num_prompt_logprobs is not None
        if not self._enable_prefix_caching or asks_prompt or num_full == 0:
            return self._no_prefix()
        hashes = self._hashes_of(request, num_full)[:num_full]
        cached: list[list[int]] = []
        for group, needed in enumerate(self._num_needed):
            found = self.pool.lookup(hashes, group)
            cached.append(found)
            if needed is None and NULL_BLOCK in found:
                hashes = hashes[: found.index(NULL_BLOCK)]
            if not hashes:
                return self._no_prefix()
        num_blocks = num_usable_blocks(cached, self._num_needed)
        tables = []
        for found, needed in zip(cached, self._num_needed, strict=True):
            start = 0 if needed is None else max(0, num_blocks - needed)
            tables.append([NULL_BLOCK] * start + found[start:num_blocks])
        return CachedPrefix(num_blocks * self._block_size, tuple(tables))

    def start(self, request: Request, num_new_tokens: int, prefix: CachedPrefix) -> bool:
        """Takes the cached prefix and blocks for the `num_new_tokens` tokens behind it.

        False, with nothing changed, unless the whole sequence as known now fits: otherwise a long
        prompt would start in blocks that it loses again before it is computed.
        """
        reused = [block_id for table in prefix.block_ids for block_id in table if block_id]
        held_by_others = len(reused) - self.pool.count_free(reused)
        most = max_blocks_per_sequence(self._spec, request.num_tokens, self._max_step_tokens)
        if most - held_by_others > self.pool.num_free:
            return False
        num_cached = len(prefix.block_ids[0])
        self.pool.touch(reused)
        blocks = SequenceBlocks(prefix.block_ids, num_cached, [0] * len(self._windows))
        self._blocks[request.request_id] = blocks
        self._grow(blocks, self._num_blocks(prefix.num_tokens + num_new_tokens) - num_cached)
        self._count_query(request, prefix.num_tokens)
        return True

    def allocate_slots(self, request: Request, num_new_tokens: int) -> BlockIds | None:
        """Makes room for the tokens behind `request.num_computed_tokens`; returns the new blocks,
        () if none are needed.

        None if they do not fit. Then nothing is changed, except that blocks which the windows have
        left behind were given back, as in any case.
        """
        blocks = self._blocks[request.request_id]
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_new_blocks = self._num_blocks(num_tokens) - len(blocks.tables[0])
        if self._windows:
            self._drop_behind_windows(blocks, request.num_computed_tokens)
        if num_new_blocks * self._num_groups > self.pool.num_free:
            return None
        return self._grow(blocks, num_new_blocks)

    def cache_blocks(self, request: Request) -> None:
        """Makes the full blocks up to `request.num_computed_tokens` findable.

        Call it only when the step that computed them has succeeded.
        """
        if not self._enable_prefix_caching:
            return
        blocks = self._blocks[request.request_id]
        num_full = request.num_computed_tokens // self._block_size
        hashes = self._hashes_of(request, num_full)
        for i in range(blocks.num_cached, num_full):
            self.pool.cache(hashes[i], [table[i] for table in blocks.tables])
        blocks.num_cached = max(blocks.num_cached, num_full)

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]] | None:
        """Gives a child with the same prompt the parent's blocks up to the last prompt token.

        Blocks before the one of the last prompt token are shared. That one is copied, as both will
        write to it: returns the (source, target) copies that must run before the next forward
        pass. The child is then computed up to `num_prompt_tokens - 1`. None, with nothing changed,
        if there is no room or a window of the parent has moved past the prompt.
        """
        blocks = self._blocks[parent.request_id]
        last = (child.num_prompt_tokens - 1) // self._block_size  # block of the last prompt token
        starts = [0] * self._num_groups
        for window, groups in self._windows:
            for group in groups:
                starts[group] = max(0, child.num_prompt_tokens - window) // self._block_size
        shared = tuple(
            [NULL_BLOCK] * start + table[start:last]
            for table, start in zip(blocks.tables, starts, strict=True)
        )
        sources = [table[last] for table in blocks.tables]
        is_gone = any(
            NULL_BLOCK in table[start:] for table, start in zip(shared, starts, strict=True)
        )
        if is_gone or NULL_BLOCK in sources or self.pool.num_free < self._num_groups:
            return None
        for table in shared:
            self.pool.touch(table)
        dropped = [starts[groups[0]] for _, groups in self._windows]
        mine = SequenceBlocks(shared, min(blocks.num_cached, last), dropped)
        self._blocks[child.request_id] = mine
        if self._enable_prefix_caching:
            self._hashes[child.request_id] = self._hashes_of(parent, last)[:last]
        targets = self._grow(mine, 1)
        return [(source, target[0]) for source, target in zip(sources, targets, strict=True)]

    def free(self, request: Request, *, keep_hashes: bool = False) -> None:
        """Gives back all blocks; cached content stays findable. Does nothing if there are none.

        `keep_hashes` for a sequence that will start again.
        """
        if not keep_hashes:
            self._hashes.pop(request.request_id, None)
        blocks = self._blocks.pop(request.request_id, None)
        if blocks is not None:
            # All groups' blocks of one position side by side: a prefix is usable as far as all
            # groups have it, so they should lose it from the end together.
            self.pool.free(
                [block_id for row in zip(*blocks.tables, strict=True) for block_id in row]
            )

    def reset_prefix_cache(self) -> None:
        """Nothing computed before can be found any more. Running sequences keep their blocks."""
        self.pool.reset_cache()

    def check_integrity(self) -> None:
        """RuntimeError if an invariant is broken. O(num_blocks); for tests and idle moments."""
        self.pool.check_integrity()
        holders = Counter(
            block_id
            for blocks in self._blocks.values()
            for table in blocks.tables
            for block_id in table
            if block_id != NULL_BLOCK
        )
        for block_id in range(1, self.pool.num_blocks):
            if self.pool.ref_count(block_id) != holders[block_id]:
                raise RuntimeError(f"block {block_id} has a wrong reference count")
        for request_id, blocks in self._blocks.items():
            if len({len(table) for table in blocks.tables}) != 1:
                raise RuntimeError(f"{request_id}: tables of different lengths")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _no_prefix(self) -> CachedPrefix:
        return CachedPrefix(0, tuple([] for _ in range(self._num_groups)))

    def _grow(self, blocks: SequenceBlocks, num_new_blocks: int) -> BlockIds:
        """Appends fresh blocks to every table; the caller knows that there are enough."""
        if num_new_blocks == 0:
            return ()
        ids = self.pool.allocate(num_new_blocks * self._num_groups)
        new = tuple(
            ids[start : start + num_new_blocks] for start in range(0, len(ids), num_new_blocks)
        )
        for table, added in zip(blocks.tables, new, strict=False):
            table += added
        return new

    def _drop_behind_windows(self, blocks: SequenceBlocks, num_computed_tokens: int) -> None:
        """Gives back blocks that end before the first token that the next one sees."""
        gone: list[int] = []
        for i, (window, groups) in enumerate(self._windows):
            start = blocks.num_dropped[i]
            end = (num_computed_tokens - window + 1) // self._block_size
            if end <= start:
                continue
            tables = [blocks.tables[group] for group in groups]
            for position in range(start, end):
                gone += [table[position] for table in tables]
                for table in tables:
                    table[position] = NULL_BLOCK
            blocks.num_dropped[i] = end
        if gone:
            self.pool.free(gone)

    def _hashes_of(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """At least the hashes of the first `num_blocks` full blocks; computed once each."""
        hashes = self._hashes.setdefault(request.request_id, [])
        extend_block_hashes(
            hashes, request.token_ids, num_blocks, self._block_size, request.cache_salt
        )
        return hashes

    def _count_query(self, request: Request, num_cached_tokens: int) -> None:
        if request.num_preemptions == 0 and self._enable_prefix_caching:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_cached_tokens
