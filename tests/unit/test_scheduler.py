"""What a step computes: order, budget, chunks, preemption, forks. Block size 4 throughout."""

from __future__ import annotations

import pytest

from llmserve.config import SchedulerConfig
from llmserve.errors import ContextLengthError, StartupError
from tests.scheduler_builders import Loop, make_request


def ids_and_counts(loop: Loop) -> list[tuple[str, int]]:
    """Runs a step; the sequences of its plan and their numbers of tokens."""
    plan = loop.step()
    return list(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True))


def test_a_prompt_is_computed_and_then_one_token_per_step() -> None:
    loop = Loop()
    loop.add(make_request("a", range(6), max_tokens=3))

    assert ids_and_counts(loop) == [("a", 6)]
    assert ids_and_counts(loop) == [("a", 1)]
    assert ids_and_counts(loop) == [("a", 1)]
    assert not loop.scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    loop = Loop(max_num_batched_tokens=8)
    loop.add(make_request("a", range(20)))

    plans = [loop.step() for _ in range(4)]

    assert [plan.num_scheduled_tokens for plan in plans] == [[8], [8], [4], [1]]
    assert [plan.is_sampling for plan in plans] == [[False], [False], [True], [True]]


def test_long_prefill_token_threshold_bounds_a_chunk() -> None:
    loop = Loop(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    loop.add(make_request("a", range(20)))
    loop.add(make_request("b", range(20)))
    loop.add(make_request("c", range(20)))

    assert ids_and_counts(loop) == [("a", 3), ("b", 3), ("c", 2)]


def test_decodes_get_a_token_in_every_step_of_a_long_prefill() -> None:
    loop = Loop(max_num_batched_tokens=8, num_blocks=64, max_model_len=128)
    for name in "abc":
        loop.add(make_request(name, range(2), max_tokens=50))
    loop.step()
    loop.add(make_request("long", range(100)))

    for _ in range(20):
        assert ids_and_counts(loop) == [("a", 1), ("b", 1), ("c", 1), ("long", 5)]


def test_by_default_prompts_leave_decodes_most_of_a_step() -> None:
    loop = Loop(max_num_batched_tokens=0, max_num_seqs=16, num_blocks=512, max_model_len=512)
    for i in range(10):
        loop.add(make_request(str(i), range(i, i + 8)))
    alone = loop.step()
    for i in range(2):
        loop.add(make_request(f"long{i}", range(1000 * i, 1000 * i + 300)))

    beside_ten = loop.step()
    for i in range(8):
        loop.scheduler.abort(str(i))
    beside_two = loop.step()

    assert alone.num_scheduled_tokens == [8] * 10  # more than 32: nobody waits for a token
    assert beside_ten.num_scheduled_tokens == [1] * 10 + [40]
    assert beside_two.num_scheduled_tokens == [1, 1, 32]


def test_prompts_that_pile_up_get_more_of_a_step() -> None:
    loop = Loop(max_num_batched_tokens=0, max_num_seqs=16, num_blocks=1024, max_model_len=512)
    loop.add(make_request("a", range(8)))
    loop.step()
    for i in range(6):
        loop.add(make_request(f"long{i}", range(1000 * i, 1000 * i + 400)))

    plan = loop.step()

    assert plan.num_scheduled_tokens == [1, 6 * 400 // 64]


def test_a_budget_that_is_set_is_for_prompts_too() -> None:
    loop = Loop(max_num_batched_tokens=128, num_blocks=128, max_model_len=256)
    loop.add(make_request("a", range(8)))
    loop.step()
    loop.add(make_request("b", range(100, 300)))

    plan = loop.step()

    assert plan.num_scheduled_tokens == [1, 127]


def test_waiting_tokens_are_counted_only_where_they_matter() -> None:
    limits: list[int] = []

    def count(limit: int) -> int:
        limits.append(limit)
        return limit

    assert SchedulerConfig(max_num_batched_tokens=256).prompt_tokens_beside(5, count) == 251
    assert SchedulerConfig().prompt_tokens_beside(0, count) == 128
    assert limits == []
    assert SchedulerConfig(max_num_seqs=512).prompt_tokens_beside(2, count) == 510
    assert limits == [64 * 510]


def test_no_more_than_max_num_seqs_run() -> None:
    loop = Loop(max_num_seqs=2)
    for name in "abc":
        loop.add(make_request(name, range(4), max_tokens=2))

    assert ids_and_counts(loop) == [("a", 4), ("b", 4)]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    assert ids_and_counts(loop) == [("a", 1), ("b", 1)]
    assert ids_and_counts(loop) == [("c", 4)]


def test_requests_start_in_order_of_arrival() -> None:
    loop = Loop(num_blocks=5, max_num_seqs=4)
    loop.add(make_request("a", range(8)))
    loop.add(make_request("b", range(12)))  # does not fit beside a
    loop.add(make_request("c", range(2)))  # would fit, but came later

    assert ids_and_counts(loop) == [("a", 8)]
    assert loop.scheduler.num_waiting == 2


def test_a_lower_priority_value_starts_first() -> None:
    loop = Loop(max_num_seqs=1, scheduling_policy="priority")
    loop.add(make_request("late", range(4), max_tokens=1, priority=5))
    loop.add(make_request("first", range(4), max_tokens=1, priority=-1))
    loop.add(make_request("second", range(4), max_tokens=1, priority=-1))

    assert [loop.step().request_ids for _ in range(3)] == [["first"], ["second"], ["late"]]


def test_cached_tokens_are_not_computed_again() -> None:
    loop = Loop()
    first, second = make_request("a", range(10), max_tokens=1), make_request("b", range(10))
    loop.add(first)
    loop.step()
    loop.add(second)

    plan = loop.step()

    assert (plan.num_computed_tokens, plan.num_scheduled_tokens) == ([8], [2])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert loop.scheduler.take_counts() == (0, 20, 8)
    assert loop.scheduler.take_counts() == (0, 0, 0)


def test_output_is_reused_as_soon_as_its_block_is_full() -> None:
    loop = Loop()
    first = make_request("a", range(7))
    loop.add(first)
    loop.step()
    loop.step()  # computes the first output token, the eighth in all

    loop.add(make_request("b", [*first.token_ids]))

    assert loop.step().num_computed_tokens == [8, 8]


def test_reset_prefix_cache_forgets_what_was_computed() -> None:
    loop = Loop()
    loop.add(make_request("a", range(10), max_tokens=1))
    loop.step()
    loop.scheduler.reset_prefix_cache()
    loop.add(make_request("b", range(10)))

    assert ids_and_counts(loop) == [("b", 10)]


def test_first_schedule_is_noted_once() -> None:
    loop = Loop(num_blocks=6)
    request = make_request("b", range(4), max_tokens=12)
    loop.add(make_request("a", range(4), max_tokens=12))
    loop.add(request)

    loop.step()
    first = request.first_scheduled_time
    loop.run()

    assert first == 2.0  # the clock's second reading; a took the first
    assert request.num_preemptions > 0
    assert request.first_scheduled_time == first


# Preemption.


def test_the_last_to_arrive_loses_its_blocks_and_keeps_its_tokens() -> None:
    loop = Loop(num_blocks=5)
    a, b = make_request("a", range(7), max_tokens=4), make_request("b", range(7), max_tokens=4)
    loop.add(a)
    loop.add(b)
    loop.step()
    loop.step()  # both have 8 computed tokens and need a third block

    plan = loop.step()

    assert plan.request_ids == ["a"]
    assert plan.released_ids == ["b"]
    assert b.num_preemptions == 1
    assert (b.num_computed_tokens, b.num_output_tokens) == (0, 2)
    assert loop.scheduler.num_preemptions == 1


def test_a_preempted_request_starts_before_later_ones_with_all_its_tokens() -> None:
    loop = Loop(num_blocks=5)
    loop.add(make_request("a", range(7), max_tokens=4))
    b = make_request("b", range(7, 14), max_tokens=4)
    loop.add(b)
    for _ in range(3):
        loop.step()
    loop.add(make_request("c", range(2)))
    tokens = list(b.token_ids)

    loop.step()  # a ends
    plan = loop.step()

    assert plan.request_ids[0] == "b"
    assert plan.new[0].token_ids[: len(tokens)] == tokens
    assert plan.new[0].num_prompt_tokens == 7


def test_priority_decides_who_is_preempted() -> None:
    loop = Loop(num_blocks=5, scheduling_policy="priority")
    loop.add(make_request("low", range(7), max_tokens=4, priority=1))
    loop.add(make_request("high", range(7, 14), max_tokens=4, priority=0))
    loop.step()
    loop.step()

    plan = loop.step()

    assert plan.request_ids == ["high"]
    assert plan.released_ids == ["low"]


def test_nothing_starts_in_a_step_that_preempted() -> None:
    loop = Loop(num_blocks=5)
    loop.add(make_request("a", range(7), max_tokens=4))
    loop.add(make_request("b", range(7, 14), max_tokens=4))
    loop.step()
    loop.step()
    loop.add(make_request("c", range(1)))

    assert loop.step().request_ids == ["a"]


def test_a_prompt_starts_only_when_it_fits_as_a_whole() -> None:
    loop = Loop(num_blocks=8, max_num_batched_tokens=8)
    loop.add(make_request("a", range(7), max_tokens=3))
    loop.add(make_request("b", range(7, 30)))  # 6 blocks of the 5 that are left

    assert ids_and_counts(loop) == [("a", 7)]
    assert ids_and_counts(loop) == [("a", 1)]


# Limits.


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    loop = Loop(num_blocks=5, max_model_len=100)

    assert loop.scheduler.max_model_len == 16
    with pytest.raises(ContextLengthError, match="16 tokens that a request can have"):
        loop.scheduler.add(make_request("a", range(16)))
    assert not loop.scheduler.has_work


def test_a_cache_that_fits_no_request_is_refused() -> None:
    with pytest.raises(StartupError, match="--kv-cache-memory-bytes"):
        Loop(windows=(None, None, None), num_blocks=3)


def test_a_request_id_is_taken_once() -> None:
    loop = Loop()
    loop.add(make_request("a", range(4)))

    with pytest.raises(ValueError, match="request a already"):
        loop.scheduler.add(make_request("a", range(4)))


def test_a_step_must_end_before_the_next_is_scheduled() -> None:
    loop = Loop()
    loop.add(make_request("a", range(4)))
    loop.scheduler.schedule()

    with pytest.raises(RuntimeError, match="neither updated nor failed"):
        loop.scheduler.schedule()


def test_nothing_to_do_is_an_empty_plan() -> None:
    loop = Loop()

    assert loop.scheduler.schedule().is_empty
    assert loop.scheduler.schedule().is_empty
    assert not loop.scheduler.has_work


# Children.


def test_children_wait_for_the_parents_prompt_and_then_fork() -> None:
    loop = Loop(max_num_batched_tokens=8)
    loop.add(make_request("a-0", range(10)))
    loop.add(make_request("a-1", range(10), seed=1, parent_id="a-0"))
    loop.add(make_request("a-2", range(10), seed=2, parent_id="a-0"))

    assert ids_and_counts(loop) == [("a-0", 8)]
    assert loop.scheduler.num_waiting == 2
    assert ids_and_counts(loop) == [("a-0", 2)]
    plan = loop.step()

    assert plan.request_ids == ["a-0", "a-1", "a-2"]
    assert plan.num_computed_tokens == [10, 9, 9]
    assert plan.num_scheduled_tokens == [1, 1, 1]
    assert [source for source, _ in plan.block_copies] == [3, 3]


def test_a_child_reports_the_cached_tokens_of_its_parent() -> None:
    loop = Loop()
    child = make_request("b-1", range(10), seed=1, parent_id="b-0")
    loop.add(make_request("a", range(10), max_tokens=1))
    loop.step()
    loop.add(make_request("b-0", range(10)))
    loop.add(child)
    loop.step()
    loop.step()

    assert child.num_cached_tokens == 8


def test_children_start_alone_when_the_parent_ends_with_its_first_token() -> None:
    loop = Loop()
    child = make_request("a-1", range(10), max_tokens=1, seed=1, parent_id="a-0")
    loop.add(make_request("a-0", range(10), max_tokens=1))
    loop.add(child)
    loop.step()

    plan = loop.step()

    assert (plan.request_ids, plan.block_copies) == (["a-1"], [])
    assert plan.num_computed_tokens == [8]  # from the prefix cache


def test_children_start_alone_when_the_parent_is_aborted() -> None:
    loop = Loop(max_num_batched_tokens=8)
    loop.add(make_request("a-0", range(10)))
    loop.add(make_request("a-1", range(10), seed=1, parent_id="a-0"))
    loop.step()

    loop.scheduler.abort("a-0")

    assert loop.step().request_ids == ["a-1"]


def test_a_waiting_child_can_be_aborted() -> None:
    loop = Loop(max_num_batched_tokens=8)
    loop.add(make_request("a-0", range(10), max_tokens=1))
    loop.add(make_request("a-1", range(10), seed=1, parent_id="a-0"))
    loop.step()

    loop.scheduler.abort("a-1")
    loop.run()

    assert not loop.scheduler.has_work
    assert loop.scheduler.kv_cache_usage == 0.0


def test_a_child_of_a_parent_whose_window_moved_on_starts_alone() -> None:
    loop = Loop(windows=(None, 5), max_num_seqs=2, num_blocks=64)
    loop.add(make_request("b", range(20, 24), max_tokens=12))
    loop.add(make_request("a-0", range(10), max_tokens=20))
    child = make_request("a-1", range(10), max_tokens=2, seed=1, parent_id="a-0")
    loop.add(child)
    while "a-1" not in (plan := loop.step()).request_ids:
        pass

    assert plan.block_copies == []
    assert plan.num_computed_tokens[plan.request_ids.index("a-1")] == 8
    loop.run()
    loop.check_tokens(child)
