"""Eviction order, sharing and errors of the block pool; the C++ pool and the Python twin alike."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from llmserve._block_allocator import BlockPool as NativeBlockPool
from llmserve.kvcache import BlockHash, BlockPool, PyBlockPool, make_block_pool

MakePool = Callable[[int], BlockPool]


@pytest.fixture(params=[NativeBlockPool, PyBlockPool], ids=["native", "python"])
def make_pool(request: pytest.FixtureRequest) -> MakePool:
    return request.param  # type: ignore[no-any-return]


def block_hash(name: str) -> BlockHash:
    return BlockHash(hashlib.sha256(name.encode()).digest())


def test_null_block_is_never_given_out(make_pool: MakePool) -> None:
    pool = make_pool(4)

    assert pool.allocate(3) == [1, 2, 3]
    assert pool.num_free == 0


def test_allocating_more_than_is_free_changes_nothing(make_pool: MakePool) -> None:
    pool = make_pool(4)

    with pytest.raises(ValueError, match="not enough free blocks"):
        pool.allocate(4)

    assert pool.free_order() == [1, 2, 3]


def test_blocks_without_hash_are_reused_before_cached_ones(make_pool: MakePool) -> None:
    pool = make_pool(5)
    blocks = pool.allocate(4)
    pool.cache(block_hash("a"), [blocks[0]])
    pool.cache(block_hash("c"), [blocks[2]])

    pool.free(blocks)

    assert pool.free_order() == [2, 4, 3, 1]


def test_the_end_of_a_chain_is_evicted_before_its_beginning(make_pool: MakePool) -> None:
    pool = make_pool(4)
    chain = pool.allocate(3)
    hashes = [block_hash(name) for name in "abc"]
    for name, block_id in zip(hashes, chain, strict=True):
        pool.cache(name, [block_id])
    pool.free(chain)

    assert pool.allocate(1) == [chain[2]]
    assert pool.lookup(hashes, 0) == [chain[0], chain[1], 0]


def test_chains_are_evicted_in_the_order_of_their_last_use(make_pool: MakePool) -> None:
    pool = make_pool(4)
    a, b, c = pool.allocate(3)
    for name, block_id in zip("abc", (a, b, c), strict=True):
        pool.cache(block_hash(name), [block_id])
        pool.free([block_id])
    pool.touch([a])
    pool.free([a])

    assert pool.allocate(3) == [b, c, a]


def test_a_touched_block_is_safe_from_eviction(make_pool: MakePool) -> None:
    pool = make_pool(3)
    a, b = pool.allocate(2)
    pool.cache(block_hash("a"), [a])
    pool.free([a, b])

    pool.touch([a])

    assert pool.allocate(1) == [b]
    assert pool.num_free == 0
    assert pool.ref_count(a) == 1


def test_a_block_is_free_when_its_last_holder_gives_it_back(make_pool: MakePool) -> None:
    pool = make_pool(2)
    blocks = pool.allocate(1)
    pool.touch(blocks)

    pool.free(blocks)
    assert pool.num_free == 0

    pool.free(blocks)
    assert pool.num_free == 1


def test_an_evicted_block_is_not_found_any_more(make_pool: MakePool) -> None:
    pool = make_pool(2)
    (block_id,) = pool.allocate(1)
    pool.cache(block_hash("a"), [block_id])
    pool.free([block_id])

    pool.allocate(1)

    assert pool.lookup([block_hash("a")], 0) == [0]
    assert pool.hash_of(block_id) is None


def test_groups_do_not_find_each_others_blocks(make_pool: MakePool) -> None:
    pool = make_pool(3)
    a, b = pool.allocate(2)

    pool.cache(block_hash("x"), [a, b])

    assert pool.lookup([block_hash("x")], 0) == [a]
    assert pool.lookup([block_hash("x")], 1) == [b]
    assert pool.lookup([block_hash("x")], 2) == [0]


def test_equal_content_is_cached_once(make_pool: MakePool) -> None:
    pool = make_pool(3)
    a, b = pool.allocate(2)

    pool.cache(block_hash("x"), [a])
    pool.cache(block_hash("x"), [b])

    assert pool.lookup([block_hash("x")], 0) == [a]
    assert pool.hash_of(b) is None
    assert pool.num_cached == 1


def test_the_null_block_is_ignored_in_lists(make_pool: MakePool) -> None:
    pool = make_pool(3)

    pool.touch([0])
    pool.free([0, 0])
    pool.cache(block_hash("x"), [0])

    assert pool.count_free([0]) == 0
    assert pool.num_cached == 0
    pool.check_integrity()


def test_reset_cache_keeps_holders_and_eviction_order(make_pool: MakePool) -> None:
    pool = make_pool(5)
    blocks = pool.allocate(4)
    for name, block_id in zip("abc", blocks[:3], strict=True):
        pool.cache(block_hash(name), [block_id])
    pool.free(blocks[1:])
    order = pool.free_order()

    pool.reset_cache()

    assert pool.free_order() == order
    assert pool.num_cached == 0
    assert pool.ref_count(blocks[0]) == 1
    pool.check_integrity()


def test_misuse_is_an_error(make_pool: MakePool) -> None:
    pool = make_pool(3)

    with pytest.raises(RuntimeError, match="block 1 is free"):
        pool.free([1])
    with pytest.raises(RuntimeError, match="block 1 is free and not cached"):
        pool.touch([1])
    with pytest.raises(RuntimeError, match="block 1 is free"):
        pool.cache(block_hash("x"), [1])
    with pytest.raises(IndexError, match="there is no block 3"):
        pool.free([3])
    with pytest.raises(ValueError, match="a block hash is 32 bytes"):
        pool.lookup([BlockHash(b"short")], 0)
    with pytest.raises(ValueError, match="null block and one more"):
        make_pool(1)


def test_the_environment_chooses_the_pool() -> None:
    assert isinstance(make_block_pool(2), NativeBlockPool)

    code = "from llmserve.kvcache import make_block_pool; print(type(make_block_pool(2)).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LLMSERVE_NO_EXT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "PyBlockPool"
