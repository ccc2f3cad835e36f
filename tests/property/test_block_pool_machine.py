"""The C++ block pool and its Python twin, driven in step by random operations.

The machine keeps its own model: which tables hold which blocks, and what each cached block holds.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmserve._block_allocator import BlockPool
from llmserve.kvcache import NULL_BLOCK, BlockHash, PyBlockPool

NUM_BLOCKS = 12


def hash_of(content: tuple[int, ...]) -> BlockHash:
    return BlockHash(hashlib.sha256(repr(content).encode()).digest())


class PoolMachine(RuleBasedStateMachine):
    """Tables are chains of tokens; a table's first blocks are full, the last may be writable."""

    def __init__(self) -> None:
        super().__init__()
        self.native = BlockPool(NUM_BLOCKS)
        self.python = PyBlockPool(NUM_BLOCKS)
        self.tables: list[tuple[list[int], list[int]]] = []  # (blocks, one token per block)
        self.content: dict[int, tuple[int, ...]] = {}  # cached block -> tokens from the start
        self.last_freed: list[int] = []

    def both(self, name: str, *args: object) -> object:
        """Calls both pools; they must agree."""
        result = getattr(self.native, name)(*args)
        assert getattr(self.python, name)(*args) == result
        return result

    def draw_table(self, data: st.DataObject) -> tuple[list[int], list[int]]:
        return data.draw(st.sampled_from(self.tables))

    @rule(tokens=st.lists(st.integers(0, 1), max_size=5))
    def start(self, tokens: list[int]) -> None:
        """A new table: the longest cached beginning, then fresh blocks."""
        hashes = [hash_of(tuple(tokens[: i + 1])) for i in range(len(tokens))]
        found = self.both("lookup", hashes, 0)
        assert isinstance(found, list)
        for i, block_id in enumerate(found):
            known = [b for b, content in self.content.items() if content == tuple(tokens[: i + 1])]
            assert known == ([] if block_id == NULL_BLOCK else [block_id])
        shared = found[: found.index(NULL_BLOCK)] if NULL_BLOCK in found else found
        num_taken = self.both("count_free", shared)
        assert isinstance(num_taken, int)
        num_fresh = len(tokens) - len(shared)
        if num_fresh + num_taken > self.python.num_free:
            return
        self.both("touch", shared)
        self.tables.append((shared, tokens[: len(shared)]))
        for token in tokens[len(shared) :]:
            self.append(self.tables[-1], token)

    def append(self, table: tuple[list[int], list[int]], token: int) -> None:
        expected = self.python.free_order()[0]
        fresh = self.both("allocate", 1)
        assert fresh == [expected]
        self.content.pop(expected, None)  # evicted
        table[0].append(expected)
        table[1].append(token)

    @precondition(lambda self: self.tables and self.python.num_free)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        self.append(self.draw_table(data), token)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """All blocks of a table are full: they become findable."""
        blocks, tokens = self.draw_table(data)
        for i, block_id in enumerate(blocks):
            content = tuple(tokens[: i + 1])
            self.both("cache", hash_of(content), [block_id])
            if content not in self.content.values() and block_id not in self.content:
                self.content[block_id] = content

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks, tokens = self.draw_table(data)
        self.both("touch", blocks)
        self.tables.append((list(blocks), list(tokens)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks, _ = table = self.draw_table(data)
        self.tables.remove(table)
        held = Counter(block_id for other, _ in self.tables for block_id in other)
        before = self.python.free_order()
        self.both("free", blocks)
        freed = [block_id for block_id in reversed(blocks) if not held[block_id]]
        plain = [block_id for block_id in freed if block_id not in self.content]
        cached = [block_id for block_id in freed if block_id in self.content]
        assert self.python.free_order() == [*reversed(plain), *before, *cached]

    @rule()
    def reset_cache(self) -> None:
        self.both("reset_cache")
        self.content.clear()

    @invariant()
    def pools_agree(self) -> None:
        self.both("free_order")
        assert self.native.num_free == self.python.num_free
        assert self.native.num_cached == self.python.num_cached == len(self.content)
        self.both("check_integrity")

    @invariant()
    def references_are_holders(self) -> None:
        holders = Counter(block_id for blocks, _ in self.tables for block_id in blocks)
        for block_id in range(1, NUM_BLOCKS):
            assert self.both("ref_count", block_id) == holders[block_id]
        num_used = sum(1 for count in holders.values() if count)
        assert self.python.num_free + num_used == NUM_BLOCKS - 1

    @invariant()
    def hashes_are_those_of_the_content(self) -> None:
        for block_id in range(1, NUM_BLOCKS):
            content = self.content.get(block_id)
            expected = None if content is None else hash_of(content)
            assert self.both("hash_of", block_id) == expected


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPools = PoolMachine.TestCase
