"""Block tables of sequences: allocation, sliding windows, prefix cache, forks.

Owns which block holds which tokens of which sequence. All KV cache groups draw from one pool. A
sequence's tables are kept by rows: row i has the blocks of all groups for tokens i * block_size and
following. In a group with a window, entries that no later token can see are the null block. Knows
no queues and no steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llmserve.core import KVCacheSpec, Request
from llmserve.core.capacity import max_blocks_per_sequence
from llmserve.kvcache.block_pool import NULL_BLOCK, make_block_pool
from llmserve.kvcache.prefix import BlockHash, extend_block_hashes, num_usable_blocks

BlockIds = tuple[list[int], ...]  # one block table, or a piece of it, per group
Row = list[int]  # one block per group


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the prefix cache holds of a sequence's beginning; nothing is reserved yet."""

    num_tokens: int
    rows: list[Row]  # null where a window needs no block


@dataclass(slots=True)
class SequenceBlocks:
    """Invariant: the rows cover exactly the tokens computed or scheduled, in whole blocks."""

    rows: list[Row]
    num_cached: int  # first rows that went through the prefix cache
    num_dropped: list[int]  # per window: first rows in which its groups' blocks are null


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
        self.block_size = spec.block_size
        self._max_step_tokens = max_step_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._num_groups = len(spec.groups)
        windows = [group.sliding_window for group in spec.groups]
        self._windows = _group_slices(windows)
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
        return _columns(self._blocks[request_id].rows)

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """The longest cached beginning of a sequence, in whole blocks and short of its last token.

        Empty for a sequence that wants prompt logprobs, which cached tokens cannot give.
        """
        num_full = (request.num_tokens - 1) // self.block_size
        asks_prompt = request.sampling.num_prompt_logprobs is not None
        if not self._enable_prefix_caching or asks_prompt or num_full == 0:
            return CachedPrefix(0, [])
        hashes = self._hashes_of(request, num_full)[:num_full]
        cached: list[list[int]] = []
        for group, needed in enumerate(self._num_needed):
            found = self.pool.lookup(hashes, group)
            cached.append(found)
            if needed is None and NULL_BLOCK in found:
                hashes = hashes[: found.index(NULL_BLOCK)]
            if not hashes:
                return CachedPrefix(0, [])
        num_rows = num_usable_blocks(cached, self._num_needed)
        for found, needed in zip(cached, self._num_needed, strict=True):
            start = 0 if needed is None else max(0, num_rows - needed)
            found[:start] = [NULL_BLOCK] * start
        rows = [list(row) for row in zip(*(found[:num_rows] for found in cached), strict=True)]
        return CachedPrefix(num_rows * self.block_size, rows)

    def start(self, request: Request, num_new_tokens: int, prefix: CachedPrefix) -> bool:
        """Takes the cached prefix and blocks for the `num_new_tokens` tokens behind it.

        False, with nothing changed, unless the whole sequence as known now fits: otherwise a long
        prompt would start in blocks that it loses again before it is computed.
        """
        reused = [block_id for row in prefix.rows for block_id in row if block_id != NULL_BLOCK]
        held_by_others = len(reused) - self.pool.count_free(reused)
        most = max_blocks_per_sequence(self._spec, request.num_tokens, self._max_step_tokens)
        if most - held_by_others > self.pool.num_free:
            return False
        self.pool.touch(reused)
        blocks = SequenceBlocks(prefix.rows, len(prefix.rows), [0] * len(self._windows))
        self._blocks[request.request_id] = blocks
        self._grow(blocks, self._num_rows(prefix.num_tokens + num_new_tokens) - len(prefix.rows))
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
        num_new_rows = self._num_rows(num_tokens) - len(blocks.rows)
        if self._windows:
            self._drop_behind_windows(blocks, request.num_computed_tokens)
        if num_new_rows * self._num_groups > self.pool.num_free:
            return None
        return self._grow(blocks, num_new_rows)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Makes the full blocks of the first `num_tokens` tokens findable.

        Call it only when the steps that computed them have succeeded.
        """
        if not self._enable_prefix_caching:
            return
        blocks = self._blocks[request.request_id]
        num_full = num_tokens // self.block_size
        hashes = self._hashes_of(request, num_full)
        for i in range(blocks.num_cached, num_full):
            self.pool.cache(hashes[i], blocks.rows[i])
        blocks.num_cached = num_full

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]] | None:
        """Gives a child with the same prompt the parent's blocks up to the last prompt token.

        Blocks before the one of the last prompt token are shared. That one is copied, as both will
        write to it: returns the (source, target) copies that must run before the next forward
        pass. The child is then computed up to `num_prompt_tokens - 1`. None, with nothing changed,
        if there is no room or a window of the parent has moved past the prompt.
        """
        blocks = self._blocks[parent.request_id]
        last = (child.num_prompt_tokens - 1) // self.block_size  # row of the last prompt token
        rows = [list(row) for row in blocks.rows[:last]]
        sources = blocks.rows[last]
        starts = [max(0, child.num_prompt_tokens - w) // self.block_size for w, _ in self._windows]
        for start, (_, groups) in zip(starts, self._windows, strict=True):
            if any(NULL_BLOCK in row[groups] for row in blocks.rows[start : last + 1]):
                return None
            for row in rows[:start]:
                row[groups] = [NULL_BLOCK] * len(row[groups])
        if self.pool.num_free < self._num_groups:
            return None
        for row in rows:
            self.pool.touch(row)
        mine = SequenceBlocks(rows, min(blocks.num_cached, last), starts)
        self._blocks[child.request_id] = mine
        if self._enable_prefix_caching:
            self._hashes[child.request_id] = self._hashes_of(parent, last)[:last]
        self._grow(mine, 1)
        return list(zip(sources, mine.rows[last], strict=True))

    def free(self, request: Request, *, keep_hashes: bool = False) -> None:
        """Gives back all blocks; cached content stays findable. Does nothing if there are none.

        `keep_hashes` for a sequence that will start again.
        """
        if not keep_hashes:
            self._hashes.pop(request.request_id, None)
        blocks = self._blocks.pop(request.request_id, None)
        if blocks is not None:
            # By rows: a prefix is usable as far as all groups have it, so they should lose it
            # from the end together.
            self.pool.free([block_id for row in blocks.rows for block_id in row])

    def reset_prefix_cache(self) -> None:
        """Nothing computed before can be found any more. Running sequences keep their blocks."""
        self.pool.reset_cache()

    def check_integrity(self) -> None:
        """RuntimeError if an invariant is broken. O(num_blocks); for tests and idle moments."""
        self.pool.check_integrity()
        holders = Counter(
            block_id
            for blocks in self._blocks.values()
            for row in blocks.rows
            for block_id in row
            if block_id != NULL_BLOCK
        )
        for block_id in range(1, self.pool.num_blocks):
            if self.pool.ref_count(block_id) != holders[block_id]:
                raise RuntimeError(f"block {block_id} has a wrong reference count")

    def _num_rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, blocks: SequenceBlocks, num_new_rows: int) -> BlockIds:
        """Appends rows of fresh blocks; the caller knows that there are enough."""
        if num_new_rows == 1:  # as in decoding
            row = self.pool.allocate(self._num_groups)
            blocks.rows.append(row)
            return tuple([[block_id] for block_id in row])
        new = [self.pool.allocate(self._num_groups) for _ in range(num_new_rows)]
        blocks.rows += new
        return _columns(new)

    def _drop_behind_windows(self, blocks: SequenceBlocks, num_computed_tokens: int) -> None:
        """Gives back blocks that end before the first token that the next one sees.

        With a prefix cache not before it knows them, which is when their step has ended.
        """
        for i, (window, groups) in enumerate(self._windows):
            start = blocks.num_dropped[i]
            end = (num_computed_tokens - window + 1) // self.block_size
            if self._enable_prefix_caching:
                end = min(end, blocks.num_cached)
            if end <= start:
                continue
            gone: list[int] = []
            for row in blocks.rows[start:end]:
                gone += row[groups]
                row[groups] = [NULL_BLOCK] * (groups.stop - groups.start)
            self.pool.free(gone)
            blocks.num_dropped[i] = end

    def _hashes_of(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """At least the hashes of the first `num_blocks` full blocks; computed once each."""
        hashes = self._hashes.setdefault(request.request_id, [])
        extend_block_hashes(
            hashes, request.token_ids, num_blocks, self.block_size, request.cache_salt
        )
        return hashes

    def _count_query(self, request: Request, num_cached_tokens: int) -> None:
        if request.num_preemptions == 0 and self._enable_prefix_caching:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_cached_tokens


def _columns(rows: list[Row]) -> BlockIds:
    """Rows as block tables, one per group; () for no rows."""
    return tuple(list(table) for table in zip(*rows, strict=True))


def _group_slices(windows: list[int | None]) -> list[tuple[int, slice[int, int, None]]]:
    """The groups of each window. ValueError unless groups of one window stand side by side."""
    slices = []
    for window in sorted({window for window in windows if window is not None}):
        start, count = windows.index(window), windows.count(window)
        if windows[start : start + count] != [window] * count:
            raise ValueError("KV cache groups of one sliding window must stand side by side")
        slices.append((window, slice(start, start + count)))
    return slices
