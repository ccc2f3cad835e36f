"""Steps that are scheduled while another one is in flight."""

from __future__ import annotations

import pytest

from llmserve.core import FinishReason, RequestStatus, SamplingParams, SeqResult, StepPlan
from tests.scheduler_builders import Loop, make_request


def start(loop: Loop, *request_ids: str, **kwargs: object) -> StepPlan:
    """The step that computes the prompts of some new requests, not yet run."""
    for request_id in request_ids:
        loop.add(make_request(request_id, range(4), **kwargs))  # type: ignore[arg-type]
    return loop.scheduler.schedule()


def end(loop: Loop, plan: StepPlan) -> None:
    loop.events = loop.scheduler.update(plan, loop.runner.execute(plan))
    loop.scheduler.check_integrity()


def test_the_next_input_may_be_a_token_that_is_not_known() -> None:
    loop = Loop(async_scheduling=True)
    first = start(loop, "a")

    second = loop.scheduler.schedule()

    assert (second.request_ids, second.num_computed_tokens) == (["a"], [4])
    assert second.is_sampling == [True]
    with pytest.raises(RuntimeError, match="neither updated nor failed"):
        loop.scheduler.schedule()
    end(loop, first)
    end(loop, second)
    assert loop.scheduler.schedule().num_computed_tokens == [5]


def test_the_next_chunk_of_a_prompt_is_scheduled_ahead() -> None:
    loop = Loop(async_scheduling=True, max_num_batched_tokens=8)
    loop.add(make_request("a", range(20)))

    plans = [loop.scheduler.schedule(), loop.scheduler.schedule()]

    assert [plan.num_computed_tokens for plan in plans] == [[0], [8]]
    for plan in plans:
        end(loop, plan)
    plan = loop.scheduler.schedule()
    assert (plan.num_scheduled_tokens, plan.is_sampling) == ([4], [True])


def test_steps_end_in_their_order() -> None:
    loop = Loop(async_scheduling=True)
    first, second = start(loop, "a"), loop.scheduler.schedule()
    loop.runner.execute(first)

    with pytest.raises(RuntimeError, match="oldest"):
        loop.scheduler.update(second, loop.runner.execute(second))


@pytest.mark.parametrize("limit", [{"max_tokens": 2}, {"max_model_len": 6}])
def test_an_end_by_length_is_foreseen(limit: dict[str, int]) -> None:
    model_len = limit.get("max_model_len", 64)
    loop = Loop(async_scheduling=True, max_model_len=model_len)
    first = start(loop, "a", max_tokens=limit.get("max_tokens", 16))
    second = loop.scheduler.schedule()
    end(loop, first)

    assert loop.scheduler.schedule().is_empty
    end(loop, second)
    assert loop.events[0].finish_reason is FinishReason.LENGTH
    assert not loop.scheduler.has_work


def test_a_stop_token_drops_what_was_scheduled_behind_it() -> None:
    loop = Loop(async_scheduling=True, script=[7, 8, 9])
    request = make_request("a", range(4), stop=(7,))
    loop.add(request)
    first, second = loop.scheduler.schedule(), loop.scheduler.schedule()

    end(loop, first)

    assert (loop.events[0].finish_reason, loop.events[0].token_ids) == (FinishReason.STOP, (7,))
    assert loop.scheduler.kv_cache_usage > 0, "the second step still writes"
    assert not loop.scheduler.has_work
    end(loop, second)
    assert loop.events == []
    assert request.token_ids == [0, 1, 2, 3, 7]
    assert loop.scheduler.kv_cache_usage == 0


def test_a_dropped_token_does_not_enter_the_prefix_cache() -> None:
    loop = Loop(async_scheduling=True, script=[7, 8, 9])
    loop.add(make_request("a", range(3), stop=(7,)))
    first, second = loop.scheduler.schedule(), loop.scheduler.schedule()
    end(loop, first)
    end(loop, second)

    # The second step filled the block of 0, 1, 2, 7.
    loop.add(make_request("b", [0, 1, 2, 7, 1]))

    assert loop.scheduler.schedule().num_computed_tokens == [0]


@pytest.mark.parametrize("num_ended", [0, 1])
def test_an_abort_keeps_its_blocks_until_the_last_step_with_it_has_ended(num_ended: int) -> None:
    loop = Loop(async_scheduling=True)
    plans = [start(loop, "a"), loop.scheduler.schedule()]
    for plan in plans[:num_ended]:
        end(loop, plan)

    loop.scheduler.abort("a")

    for plan in plans[num_ended:]:
        assert loop.scheduler.kv_cache_usage > 0
        end(loop, plan)
        assert loop.events == []
    assert loop.scheduler.kv_cache_usage == 0


def test_an_id_may_come_again_while_its_blocks_are_still_held() -> None:
    loop = Loop(async_scheduling=True)
    plans = [start(loop, "a"), loop.scheduler.schedule()]
    loop.scheduler.abort("a")
    again = make_request("a", range(8, 12), max_tokens=3)
    loop.add(again)
    end(loop, plans[0])

    assert loop.scheduler.schedule().is_empty
    end(loop, plans[1])
    loop.run()

    assert again.finish_reason is FinishReason.LENGTH
    loop.check_tokens(again)


def test_one_that_fails_alone_is_dropped_from_the_step_behind() -> None:
    loop = Loop(async_scheduling=True)
    first = start(loop, "a", "b")
    second = loop.scheduler.schedule()
    result = loop.runner.execute(first)
    result.sequences[0] = SeqResult(error="the logits are NaN")

    events = loop.scheduler.update(first, result)
    end(loop, second)

    assert events[0].finish_reason is FinishReason.ERROR
    assert [event.request_id for event in loop.events] == ["b"]


def test_a_discarded_step_lets_its_sequences_start_anew() -> None:
    loop = Loop(async_scheduling=True, max_num_batched_tokens=8)
    first = start(loop, "a")
    b = make_request("b", range(10, 15), max_tokens=5)
    loop.add(b)
    second = loop.scheduler.schedule()
    assert second.request_ids == ["a", "b"]

    loop.scheduler.fail_step(first, "failed")
    loop.scheduler.discard_step(second)

    assert b.status is RequestStatus.PREEMPTED
    assert loop.scheduler.kv_cache_usage == 0
    third = loop.scheduler.schedule()
    assert third.num_computed_tokens == [0]
    assert set(third.released_ids) == {"a", "b"}
    end(loop, third)
    loop.run()
    loop.check_tokens(b)


def test_nobody_loses_blocks_while_a_step_is_in_flight() -> None:
    # 5 blocks of 4 tokens: a and b need a second one each, and then a third one.
    loop = Loop(async_scheduling=True, num_blocks=6, max_model_len=16)
    a, b = make_request("a", range(7)), make_request("b", range(7, 14))
    loop.add(a)
    loop.add(b)
    plans = [loop.scheduler.schedule(), loop.scheduler.schedule()]
    end(loop, plans[0])

    partial = loop.scheduler.schedule()

    assert partial.request_ids == ["a"], "there is one block left"
    end(loop, plans[1])
    assert loop.scheduler.schedule().is_empty, "first all steps end"
    assert b.num_preemptions == 0
    end(loop, partial)
    loop.run()
    assert b.num_preemptions > 0
    loop.check_tokens(a)
    loop.check_tokens(b)


def test_children_fork_when_the_prompt_is_computed_for_certain() -> None:
    loop = Loop(async_scheduling=True, max_num_batched_tokens=8)
    loop.add(make_request("p", range(10)))
    plans = [loop.scheduler.schedule(), loop.scheduler.schedule()]
    loop.add(make_request("c", range(10), parent_id="p"))
    end(loop, plans[0])

    assert loop.scheduler.schedule().new == []
    assert loop.scheduler.num_waiting == 1


def test_the_last_result_is_needed_while_a_dependent_sequence_runs() -> None:
    loop = Loop(async_scheduling=True)
    a = make_request("a", range(4), max_tokens=2)
    a.sampling = SamplingParams(max_tokens=2, presence_penalty=0.5)
    loop.add(a)
    loop.add(make_request("b", range(4)))

    plans = [loop.scheduler.schedule(), loop.scheduler.schedule()]
    for plan in plans:
        end(loop, plan)
    plans += [loop.scheduler.schedule(), loop.scheduler.schedule()]

    assert [plan.needs_last_result for plan in plans] == [False, True, False, False]


def test_windows_keep_blocks_until_the_prefix_cache_knows_them() -> None:
    loop = Loop(async_scheduling=True, windows=(3,), max_num_batched_tokens=16)
    loop.add(make_request("a", range(40), max_tokens=1))
    plans = [loop.scheduler.schedule(), loop.scheduler.schedule()]
    for plan in plans:
        end(loop, plan)
    loop.run()

    loop.add(make_request("b", [*range(12), 60, 61]))

    assert loop.scheduler.schedule().num_computed_tokens == [12]


def test_what_a_step_in_flight_computes_is_not_reused_if_it_fails() -> None:
    loop = Loop(async_scheduling=True, max_num_batched_tokens=8)
    loop.add(make_request("a", range(20)))
    plans = [loop.scheduler.schedule(), loop.scheduler.schedule()]
    end(loop, plans[0])
    loop.scheduler.fail_step(plans[1], "failed")

    loop.add(make_request("b", range(20)))

    assert loop.scheduler.schedule().num_computed_tokens == [8]
