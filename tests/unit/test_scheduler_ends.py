"""How sequences end: stop rules, aborts, failures, and what the runner is told."""

from __future__ import annotations

import pytest

from llmserve.core import FinishReason, SeqResult, StepResult, TokenEvent
from tests.scheduler_builders import Loop, make_request


def run_alone(loop: Loop, **request: object) -> list[TokenEvent]:
    loop.add(make_request("a", range(4), **request))  # type: ignore[arg-type]
    events = []
    while loop.scheduler.has_work:
        loop.step()
        events += loop.events
    return events


def test_max_tokens_ends_with_length() -> None:
    events = run_alone(Loop(script=[7]), max_tokens=3)

    assert [event.token_ids for event in events] == [(7,)] * 3
    assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]


def test_the_context_ends_with_length() -> None:
    events = run_alone(Loop(script=[7], max_model_len=9), max_tokens=100)

    assert len(events) == 5
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_eos_ends_with_stop_and_no_stop_reason() -> None:
    events = run_alone(Loop(script=[7, 8, 9]), eos=(2, 8))

    assert [event.token_ids for event in events] == [(7,), (8,)]
    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, None)


def test_a_stop_token_is_the_stop_reason() -> None:
    events = run_alone(Loop(script=[7, 8, 9]), stop=(8,))

    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, 8)


def test_eos_comes_before_stop_tokens_and_both_before_length() -> None:
    events = run_alone(Loop(script=[7, 8]), eos=(8,), stop=(8,), max_tokens=2)
    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, None)

    events = run_alone(Loop(script=[7, 8]), stop=(8,), max_tokens=2)
    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, 8)


@pytest.mark.parametrize("rule", ["eos", "stop"])
def test_nothing_stops_before_min_tokens(rule: str) -> None:
    events = run_alone(Loop(script=[8]), **{rule: (8,)}, min_tokens=3)

    assert len(events) == 3
    assert events[-1].finish_reason is FinishReason.STOP


def test_the_first_token_can_be_the_last() -> None:
    events = run_alone(Loop(script=[8]), eos=(8,))

    assert [event.finish_reason for event in events] == [FinishReason.STOP]


def test_an_ended_request_holds_nothing_and_is_released_once() -> None:
    loop = Loop()
    request = make_request("a", range(4), max_tokens=1)
    loop.add(request)
    loop.step()

    assert request.finish_reason is FinishReason.LENGTH
    assert loop.scheduler.kv_cache_usage == 0.0
    assert loop.scheduler.schedule().released_ids == []  # not executed, so not yet
    loop.add(make_request("b", range(4)))
    assert loop.step().released_ids == ["a"]
    assert loop.step().released_ids == []


def test_a_stop_string_ends_a_request_between_steps() -> None:
    loop = Loop()
    request = make_request("a", range(4))
    loop.add(request)
    loop.step()

    loop.scheduler.finish("a", FinishReason.STOP, "\n\n")

    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\n\n")
    assert not loop.scheduler.has_work
    assert loop.scheduler.kv_cache_usage == 0.0


def test_finishing_twice_keeps_the_first_reason() -> None:
    loop = Loop()
    request = make_request("a", range(4), max_tokens=1)
    loop.add(request)
    loop.step()

    loop.scheduler.abort("a")
    loop.scheduler.abort("never seen")

    assert request.finish_reason is FinishReason.LENGTH


def test_a_waiting_request_is_aborted_without_a_word_to_the_runner() -> None:
    loop = Loop()
    loop.add(make_request("a", range(4)))
    loop.scheduler.abort("a")
    loop.add(make_request("b", range(4)))

    plan = loop.step()

    assert (plan.request_ids, plan.released_ids) == (["b"], [])


def test_blocks_of_an_abort_in_flight_are_kept_until_the_step_is_over() -> None:
    loop = Loop()
    a, b = make_request("a", range(8)), make_request("b", range(8, 16))
    loop.add(a)
    loop.add(b)
    plan = loop.scheduler.schedule()

    loop.scheduler.abort("a")
    during = loop.scheduler.kv_cache_usage
    events = loop.scheduler.update(plan, loop.runner.execute(plan))

    assert during == pytest.approx(4 / 31)
    assert loop.scheduler.kv_cache_usage == pytest.approx(2 / 31)
    assert [event.request_id for event in events] == ["b"]
    assert a.num_output_tokens == 0
    assert loop.step().released_ids == ["a"]


def test_what_an_aborted_request_computed_in_flight_is_not_reused() -> None:
    loop = Loop()
    loop.add(make_request("a", range(8)))
    plan = loop.scheduler.schedule()
    loop.scheduler.abort("a")
    loop.scheduler.update(plan, loop.runner.execute(plan))

    loop.add(make_request("b", range(8)))

    assert loop.step().num_computed_tokens == [0]


def test_a_failed_step_ends_its_requests_and_leaves_nothing_to_reuse() -> None:
    loop = Loop()
    a = make_request("a", range(8))
    loop.add(a)
    plan = loop.scheduler.schedule()

    events = loop.scheduler.fail_step(plan, "the forward pass failed")

    assert [(event.finish_reason, event.error) for event in events] == [
        (FinishReason.ERROR, "the forward pass failed")
    ]
    assert a.finish_reason is FinishReason.ERROR
    assert loop.scheduler.kv_cache_usage == 0.0
    loop.add(make_request("b", range(8)))
    plan = loop.step()
    assert plan.num_computed_tokens == [0]
    assert plan.released_ids == ["a"]


def test_a_failed_step_leaves_alone_who_was_not_in_it() -> None:
    loop = Loop(max_num_seqs=1)
    b = make_request("b", range(4), max_tokens=5)
    loop.add(make_request("a", range(4)))
    loop.add(b)

    loop.scheduler.fail_step(loop.scheduler.schedule(), "failed")
    loop.run()

    assert b.finish_reason is FinishReason.LENGTH
    loop.check_tokens(b)


def test_releases_of_a_failed_step_are_repeated() -> None:
    loop = Loop()
    loop.add(make_request("a", range(4), max_tokens=1))
    loop.step()
    loop.add(make_request("b", range(4)))
    loop.scheduler.fail_step(loop.scheduler.schedule(), "failed")
    loop.add(make_request("c", range(4)))

    assert loop.step().released_ids == ["a", "b"]


def test_an_aborted_request_of_a_failed_step_gets_no_event() -> None:
    loop = Loop()
    loop.add(make_request("a", range(4)))
    plan = loop.scheduler.schedule()
    loop.scheduler.abort("a")

    assert loop.scheduler.fail_step(plan, "failed") == []
    assert loop.scheduler.kv_cache_usage == 0.0


def test_decodes_that_lack_memory_run_by_half_from_then_on() -> None:
    loop = Loop(max_num_seqs=6)
    requests = [make_request(name, range(4), max_tokens=4) for name in "abcdef"]
    for request in requests:
        loop.add(request)
    loop.step()
    plan = loop.scheduler.schedule()
    assert plan.num_scheduled_tokens == [1] * 6

    assert loop.scheduler.retry_step(plan)

    sizes = []
    while loop.scheduler.has_work:
        sizes.append(len(loop.step().request_ids))
    assert max(sizes) == 3
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        loop.check_tokens(request)


def test_those_that_a_step_without_memory_left_out_wait_too() -> None:
    """Blocks have run out, so that the step has one of four sequences."""
    loop = Loop(num_blocks=5, async_scheduling=True)
    requests = [make_request(name, range(4), max_tokens=4) for name in "abc"]
    requests.append(make_request("d", range(3), max_tokens=4))
    for request in requests:
        loop.add(request)
    prompts = loop.scheduler.schedule()
    decode = loop.scheduler.schedule()
    assert decode.request_ids == ["d"]
    loop.scheduler.update(prompts, loop.runner.execute(prompts))

    assert loop.scheduler.retry_step(decode)

    while loop.scheduler.has_work:
        assert len(loop.step().request_ids) == 1
    for request in requests:
        loop.check_tokens(request)


def test_a_step_that_lacks_memory_a_second_time_is_not_begun_anew() -> None:
    loop = Loop()
    loop.add(make_request("a", range(8)))
    first = loop.scheduler.schedule()
    assert loop.scheduler.retry_step(first)

    second = loop.scheduler.schedule()

    assert second.num_scheduled_tokens == [4]
    assert not loop.scheduler.retry_step(second)


@pytest.mark.parametrize("num_steps", [0, 1], ids=["in prefill", "in decode"])
def test_one_sequence_can_fail_alone(num_steps: int) -> None:
    loop = Loop()
    a, b = make_request("a", range(8), max_tokens=4), make_request("b", range(9, 17), max_tokens=4)
    loop.add(a)
    loop.add(b)
    for _ in range(num_steps):
        loop.step()
    plan = loop.scheduler.schedule()
    result = loop.runner.execute(plan)
    result.sequences[0] = SeqResult(error="the logits are NaN")

    events = loop.scheduler.update(plan, result)

    assert (events[0].finish_reason, events[0].error) == (FinishReason.ERROR, "the logits are NaN")
    loop.run()
    assert a.finish_reason is FinishReason.ERROR
    assert b.finish_reason is FinishReason.LENGTH
    loop.check_tokens(b)


def test_a_result_of_the_wrong_length_is_an_error() -> None:
    loop = Loop()
    loop.add(make_request("a", range(4)))
    plan = loop.scheduler.schedule()

    with pytest.raises(RuntimeError, match="1 sequences ran, 0 came back"):
        loop.scheduler.update(plan, StepResult())


def test_prompt_logprobs_come_once_although_the_prompt_is_computed_twice() -> None:
    loop = Loop(num_blocks=6, max_num_batched_tokens=8)
    b = make_request("b", range(10, 18), prompt_logprobs=0, max_tokens=8)
    loop.add(make_request("a", range(7), max_tokens=12))
    loop.add(b)
    entries = []
    while loop.scheduler.has_work:
        loop.step()
        for event in loop.events:
            entries += event.prompt_logprobs or ()

    assert b.num_preemptions > 0
    assert [entry and entry.token_id for entry in entries] == [None, *range(11, 18)]
