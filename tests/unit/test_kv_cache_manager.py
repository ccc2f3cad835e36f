"""Block tables: allocation, prefix reuse, windows, forks. Block size 4 throughout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.core import KVCacheGroup, KVCacheSpec, Request, SamplingParams
from llmserve.kvcache import KVCacheManager, max_blocks_per_sequence, max_tokens_that_fit

BLOCK_SIZE = 4


def make_spec(*windows: int | None) -> KVCacheSpec:
    groups = tuple(KVCacheGroup((i,), window) for i, window in enumerate(windows))
    return KVCacheSpec(groups, BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")


def make_manager(
    *windows: int | None, num_blocks: int = 32, max_step_tokens: int = 64, caching: bool = True
) -> KVCacheManager:
    return KVCacheManager(
        make_spec(*windows),
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        enable_prefix_caching=caching,
    )


def make_request(
    request_id: str,
    prompt: range | list[int],
    *,
    salt: str | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    sampling = SamplingParams(num_prompt_logprobs=prompt_logprobs)
    return Request(request_id, list(prompt), sampling, 0.0, cache_salt=salt)


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """Computes a sequence's next tokens (default: all), from the cache where possible.

    Returns how many the cache gave.
    """
    num_cached = 0
    if request.num_computed_tokens == 0:
        prefix = manager.get_computed_blocks(request)
        num_cached = request.num_computed_tokens = prefix.num_tokens
        count = num_tokens or request.num_tokens - num_cached
        assert manager.start(request, count, prefix)
    else:
        count = num_tokens or request.num_tokens - request.num_computed_tokens
        assert manager.allocate_slots(request, count) is not None
    request.num_computed_tokens += count
    manager.cache_blocks(request, request.num_computed_tokens)
    manager.check_integrity()
    return num_cached


def test_tables_cover_the_scheduled_tokens_in_whole_blocks() -> None:
    manager = make_manager(None, None)
    request = make_request("a", range(9))

    compute(manager, request)

    assert manager.block_ids("a") == ([1, 3, 5], [2, 4, 6])


def test_new_blocks_are_returned_per_group() -> None:
    manager = make_manager(None, None)
    request = make_request("a", range(20))
    compute(manager, request, 3)

    assert manager.allocate_slots(request, 1) == ()
    assert manager.allocate_slots(request, 7) == ([3, 5], [4, 6])


def test_a_sequence_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(None, num_blocks=4)
    request = make_request("a", range(16))
    prefix = manager.get_computed_blocks(request)

    assert not manager.start(request, 4, prefix)

    assert manager.num_free_blocks == 3
    with pytest.raises(KeyError):
        manager.block_ids("a")


def test_slots_that_do_not_fit_change_nothing() -> None:
    manager = make_manager(None, num_blocks=4)
    request = make_request("a", range(12))
    compute(manager, request)

    assert manager.allocate_slots(request, 1) is None

    assert manager.block_ids("a") == ([1, 2, 3],)
    assert manager.usage == 1.0


def test_a_repeated_prompt_is_cached_up_to_its_last_full_block() -> None:
    manager = make_manager(None)
    first, second = make_request("a", range(10)), make_request("b", range(10))
    compute(manager, first)

    assert compute(manager, second) == 8

    assert manager.block_ids("a")[0][:2] == manager.block_ids("b")[0][:2]
    assert manager.block_ids("a")[0][2] != manager.block_ids("b")[0][2]


def test_at_least_one_token_is_computed() -> None:
    manager = make_manager(None)
    compute(manager, make_request("a", range(8)))

    assert compute(manager, make_request("b", range(8))) == 4


def test_output_tokens_are_cached_as_their_blocks_fill() -> None:
    manager = make_manager(None)
    first = make_request("a", range(6))
    compute(manager, first)
    for token in range(6, 9):
        first.token_ids.append(token)
        compute(manager, first)
    manager.free(first)

    assert compute(manager, make_request("b", range(12))) == 8


def test_blocks_of_a_step_are_found_only_after_it() -> None:
    manager = make_manager(None)
    first = make_request("a", range(8))
    manager.start(first, 8, manager.get_computed_blocks(first))

    assert manager.get_computed_blocks(make_request("b", range(12))).num_tokens == 0

    first.num_computed_tokens = 8
    manager.cache_blocks(first, 8)
    assert manager.get_computed_blocks(make_request("c", range(12))).num_tokens == 8


def test_freed_blocks_stay_findable_until_they_are_given_out() -> None:
    manager = make_manager(None, num_blocks=5)
    first = make_request("a", range(12))
    compute(manager, first)
    manager.free(first)

    assert manager.usage == 0.0
    compute(manager, make_request("b", [50] * 5))  # the free block and the end of the chain

    assert manager.get_computed_blocks(make_request("c", range(13))).num_tokens == 8


def test_a_prefix_that_is_cached_but_free_counts_as_space_needed() -> None:
    manager = make_manager(None, num_blocks=4)
    first = make_request("a", range(9))
    compute(manager, first)
    manager.free(first)
    second = make_request("b", range(16))
    prefix = manager.get_computed_blocks(second)

    assert prefix.num_tokens == 8
    assert not manager.start(second, 8, prefix)
    manager.check_integrity()


def test_salts_do_not_share() -> None:
    manager = make_manager(None)
    compute(manager, make_request("a", range(10), salt="alice"))

    assert compute(manager, make_request("b", range(10), salt="bob")) == 0
    assert compute(manager, make_request("c", range(10))) == 0
    assert compute(manager, make_request("d", range(10), salt="alice")) == 8


def test_prompt_logprobs_bypass_the_cache_when_reading_only() -> None:
    manager = make_manager(None)

    assert compute(manager, make_request("a", range(10), prompt_logprobs=0)) == 0
    assert compute(manager, make_request("b", range(10), prompt_logprobs=0)) == 0
    assert compute(manager, make_request("c", range(10))) == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(None, caching=False)
    compute(manager, make_request("a", range(10)))

    assert compute(manager, make_request("b", range(10))) == 0
    assert manager.prefix_cache_queries == 0


def test_queries_and_hits_count_tokens_once_per_request() -> None:
    manager = make_manager(None)
    first, second = make_request("a", range(10)), make_request("b", range(10))
    compute(manager, first)
    compute(manager, second)
    manager.free(second, keep_hashes=True)
    second.num_computed_tokens, second.num_preemptions = 0, 1

    compute(manager, second)

    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (20, 8)


def test_reset_makes_nothing_findable_and_keeps_running_sequences() -> None:
    manager = make_manager(None)
    first = make_request("a", range(10))
    compute(manager, first)

    manager.reset_prefix_cache()

    assert manager.get_computed_blocks(make_request("b", range(10))).num_tokens == 0
    assert manager.block_ids("a") == ([1, 2, 3],)
    first.token_ids += [77, 78]
    compute(manager, first)


# Sliding windows.


def test_a_window_gives_back_blocks_that_no_later_token_sees() -> None:
    manager = make_manager(None, 5)
    request = make_request("a", range(30))
    compute(manager, request, 12)
    assert manager.block_ids("a")[1] == [2, 4, 6]

    compute(manager, request, 1)  # the token at 12 sees 8 to 12

    assert manager.block_ids("a") == ([1, 3, 5, 7], [0, 0, 6, 8])


def test_a_window_keeps_the_block_that_it_begins_in() -> None:
    manager = make_manager(6)
    request = make_request("a", range(30))
    compute(manager, request, 12)

    compute(manager, request, 1)  # the token at 12 sees 7 to 12, and 7 is in block 1

    assert manager.block_ids("a")[0][:2] == [0, 2]


def test_what_a_window_gave_back_stays_findable() -> None:
    manager = make_manager(None, 5)
    request = make_request("a", range(30))
    compute(manager, request, 12)
    compute(manager, request)

    assert compute(manager, make_request("b", range(10))) == 8
    assert manager.block_ids("b")[1][0] == 0  # only the window's block was taken


def test_a_hit_needs_the_window_before_it_and_no_more() -> None:
    manager = make_manager(None, 5, num_blocks=15)
    request = make_request("a", range(24))
    compute(manager, request)
    manager.free(request)
    compute(manager, make_request("b", [50] * 4))  # takes two free blocks
    compute(manager, make_request("c", [51] * 4))  # evicts both groups' last block

    prefix = manager.get_computed_blocks(make_request("d", range(24)))

    assert prefix.num_tokens == 20
    assert [row[1] != 0 for row in prefix.rows] == [False, False, False, False, True]


def test_a_hole_in_the_window_shortens_the_hit() -> None:
    manager = make_manager(None, 5)
    request = make_request("a", range(16))
    compute(manager, request)
    window_blocks = manager.block_ids("a")[1]
    manager.free(request)
    order = manager.pool.free_order()
    while window_blocks[2] in manager.pool.free_order():  # evict up to the third block of group 1
        manager.pool.allocate(1)
    assert len(order) > manager.pool.num_free

    assert manager.get_computed_blocks(make_request("b", range(16))).num_tokens == 8


def test_groups_of_one_window_must_stand_side_by_side() -> None:
    with pytest.raises(ValueError, match="side by side"):
        make_manager(4, None, 4)


# Forks.


def test_a_fork_shares_full_blocks_and_copies_the_last_one() -> None:
    manager = make_manager(None, None)
    parent, child = make_request("a", range(10)), make_request("b", range(10))
    compute(manager, parent)

    copies = manager.fork(parent, child)

    assert copies == [(5, 7), (6, 8)]
    assert manager.block_ids("a") == ([1, 3, 5], [2, 4, 6])
    assert manager.block_ids("b") == ([1, 3, 7], [2, 4, 8])
    manager.check_integrity()


def test_a_fork_copies_a_full_last_block_because_its_last_token_is_computed_again() -> None:
    manager = make_manager(None)
    parent, child = make_request("a", range(8)), make_request("b", range(8))
    compute(manager, parent)

    assert manager.fork(parent, child) == [(2, 3)]
    assert manager.block_ids("b") == ([1, 3],)


def test_a_fork_of_a_parent_that_went_on_shares_the_prompt_only() -> None:
    manager = make_manager(None)
    parent, child = make_request("a", range(6)), make_request("b", range(6))
    compute(manager, parent)
    for token in range(7):
        parent.token_ids.append(token)
        compute(manager, parent)

    assert manager.fork(parent, child) == [(2, 5)]
    assert manager.block_ids("b") == ([1, 5],)


def test_what_a_fork_writes_is_cached_under_its_own_tokens() -> None:
    manager = make_manager(None)
    parent, child = make_request("a", range(6)), make_request("b", range(6))
    compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 5
    parent.token_ids += [50, 51, 52]
    child.token_ids += [60, 61, 62]
    compute(manager, parent)
    compute(manager, child)

    for tail in (50, 60):
        prompt = [*range(6), tail, tail + 1, 0]
        assert manager.get_computed_blocks(make_request("c", prompt)).num_tokens == 8


def test_a_fork_needs_the_parents_window() -> None:
    manager = make_manager(None, 5)
    parent, child = make_request("a", range(10)), make_request("b", range(10))
    compute(manager, parent)
    for token in range(10):
        parent.token_ids.append(token)
        compute(manager, parent)
    usage = manager.usage

    assert manager.fork(parent, child) is None
    assert manager.usage == usage
    manager.check_integrity()


def test_a_fork_takes_the_windows_blocks_only() -> None:
    manager = make_manager(None, 5)
    parent, child = make_request("a", range(18)), make_request("b", range(18))
    compute(manager, parent)

    manager.fork(parent, child)  # computes 17 again, which sees 13 to 17

    assert [bool(block_id) for block_id in manager.block_ids("b")[1]] == [False] * 3 + [True] * 2
    manager.check_integrity()


def test_a_fork_without_room_changes_nothing() -> None:
    manager = make_manager(None, num_blocks=4)
    parent, child = make_request("a", range(10)), make_request("b", range(10))
    compute(manager, parent)

    assert manager.fork(parent, child) is None
    manager.check_integrity()


def test_freeing_a_parent_leaves_the_shared_blocks_to_the_child() -> None:
    manager = make_manager(None)
    parent, child = make_request("a", range(10)), make_request("b", range(10))
    compute(manager, parent)
    manager.fork(parent, child)

    manager.free(parent)

    assert [manager.pool.ref_count(block_id) for block_id in (1, 2, 3, 4)] == [1, 1, 0, 1]
    manager.check_integrity()


# Capacity.


def test_capacity_of_a_full_group_is_the_tokens_rounded_up() -> None:
    assert max_blocks_per_sequence(make_spec(None, None), 9, 100) == 6


def test_capacity_of_a_window_is_bounded() -> None:
    # 7 tokens before the chunk and 5 of it can touch 4 blocks: 3 | 4 | 4 | 1.
    assert max_blocks_per_sequence(make_spec(8), 1000, 5) == 4


@given(
    st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 60),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
def test_no_sequence_exceeds_its_capacity(
    windows: list[int | None], num_tokens: int, chunks: list[int]
) -> None:
    windows.sort(key=lambda window: window or 0)
    manager = make_manager(*windows, num_blocks=400, max_step_tokens=max(chunks))
    request = make_request("a", range(num_tokens))
    most = max_blocks_per_sequence(make_spec(*windows), num_tokens, max(chunks))

    for chunk in chunks:
        if num_left := num_tokens - request.num_computed_tokens:
            compute(manager, request, min(chunk, num_left))
            assert 399 - manager.num_free_blocks <= most


@pytest.mark.parametrize(
    ("num_blocks", "expected"), [(1, 0), (2, 0), (3, 4), (4, 4), (5, 8), (100, 30)]
)
def test_max_tokens_that_fit(num_blocks: int, expected: int) -> None:
    spec = make_spec(None, 100)

    assert max_tokens_that_fit(spec, num_blocks, 16, 30) == expected
