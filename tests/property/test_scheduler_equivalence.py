"""Whatever the blocks, budgets, caches, preemptions, aborts and failures: the tokens are the same.

Each example runs a workload through the scheduler and a FakeRunner, whose tokens depend on the
content of its cache, and compares with tokens that were computed without any of it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, given, settings

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import (
    FinishReason,
    KVCacheGroup,
    KVCacheSpec,
    Request,
    SamplingParams,
    StepPlan,
    TokenEvent,
)
from llmserve.scheduler import Scheduler
from tests.fake_runner import FakeRunner, reference_tokens

VOCAB_SIZE = 24
EOS, STOP = 5, 11
MAX_MODEL_LEN = 40


@dataclass
class Arrival:
    """A request with `num_choices` sequences that arrives before step `step`."""

    step: int
    prompt: list[int]
    sampling: SamplingParams
    num_choices: int = 1
    priority: int = 0
    salt: str | None = None
    abort_after: int | None = None  # steps after its arrival, while that step is in flight


@dataclass
class Setup:
    block_size: int
    windows: list[int | None]
    num_spare_blocks: int  # beyond what the largest sequence needs when it is alone
    config: SchedulerConfig
    enable_prefix_caching: bool
    failing_steps: frozenset[int] = frozenset()
    runs_after_failure: bool = False  # the step that was scheduled behind one that failed
    failing_sequences: frozenset[tuple[int, str]] = frozenset()  # (step, request id)


@dataclass
class Outcome:
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_cached: int = 0
    num_forks: int = 0
    num_ahead: int = 0  # steps that were scheduled while another one was in flight


def make_spec(setup: Setup) -> KVCacheSpec:
    groups = tuple(KVCacheGroup((i,), window) for i, window in enumerate(setup.windows))
    return KVCacheSpec(groups, setup.block_size, num_kv_heads=1, head_dim=1, dtype="float32")


def min_num_blocks(setup: Setup) -> int:
    """Blocks that a sequence of MAX_MODEL_LEN tokens needs, counted by brute force, and null."""
    budget = setup.config.token_budget
    chunk = min(setup.config.long_prefill_token_threshold or budget, budget)
    size, most = setup.block_size, 0
    for start in range(MAX_MODEL_LEN):
        end = min(start + chunk, MAX_MODEL_LEN)
        held = 0
        for window in setup.windows:
            first = 0 if window is None else max(0, start - window + 1)
            held += (end - 1) // size - first // size + 1
        most = max(most, held)
    return most + 1


class Driver:
    """Runs a workload step by step and checks every step."""

    def __init__(self, setup: Setup, arrivals: list[Arrival]) -> None:
        self.setup = setup
        self.arrivals = arrivals
        self.requests: dict[str, Request] = {}
        self.outcome = Outcome()
        # The block of a chunk's end and those before a window can be one more than the brute force
        # finds: the scheduler's bound does not know where chunks start.
        num_blocks = min_num_blocks(setup) + len(setup.windows) + setup.num_spare_blocks
        spec = make_spec(setup)
        self.step_idx = 0
        self.runner = FakeRunner(
            spec,
            num_blocks,
            vocab_size=VOCAB_SIZE,
            fails=lambda plan: self.step_idx in setup.failing_steps,
            fails_alone=lambda request_id: (self.step_idx, request_id) in setup.failing_sequences,
        )
        self.scheduler = Scheduler(
            setup.config,
            CacheConfig(
                block_size=setup.block_size, enable_prefix_caching=setup.enable_prefix_caching
            ),
            spec,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
        )
        self.in_flight: deque[StepPlan] = deque()
        assert self.scheduler.max_model_len == MAX_MODEL_LEN
        self.decoding: set[str] = set()  # got a token in the last step and goes on

    def run(self) -> Outcome:
        total = sum(a.num_choices * (len(a.prompt) + a.sampling.max_tokens) for a in self.arrivals)
        limit = 50 + 20 * total
        last_arrival = max(arrival.step for arrival in self.arrivals)
        while self.scheduler.has_work or self.in_flight or self.step_idx <= last_arrival:
            assert self.step_idx < limit, "requests do not end"
            self.add_arrivals()
            self.step()
            self.step_idx += 1
        assert self.scheduler.kv_cache_usage == 0.0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.check_that_runner_is_told_of_every_end()
        return self.outcome

    def add_arrivals(self) -> None:
        for number, arrival in enumerate(self.arrivals):
            if arrival.step != self.step_idx:
                continue
            for choice in range(arrival.num_choices):
                request = Request(
                    f"{number}-{choice}",
                    arrival.prompt,
                    sampling_of(arrival, choice),
                    arrival_time=float(arrival.step),
                    priority=arrival.priority,
                    cache_salt=arrival.salt,
                    parent_id=f"{number}-0" if choice else None,
                )
                self.requests[request.request_id] = request
                self.outcome.events[request.request_id] = []
                self.scheduler.add(request)

    def step(self) -> None:
        self.schedule()
        self.abort_in_flight()
        if not self.in_flight:
            return
        # As late as it may run: long after it was scheduled.
        plan = self.in_flight.popleft()
        try:
            result = self.runner.execute(plan)
        except RuntimeError:
            events = self.scheduler.fail_step(plan, "failed")
            assert all(event.finish_reason is FinishReason.ERROR for event in events)
            self.discard_in_flight()
        else:
            events = self.scheduler.update(plan, result)
        self.scheduler.check_integrity()
        self.decoding.clear()
        for one in events:
            self.outcome.events[one.request_id].append(one)
            if one.finish_reason is None and one.token_ids:
                self.decoding.add(one.request_id)
        counts = self.scheduler.take_counts()
        self.outcome.num_preemptions += counts.preemptions
        self.outcome.num_cached += counts.prefix_cache_hits
        self.outcome.num_forks += bool(plan.block_copies)

    def schedule(self) -> None:
        while len(self.in_flight) < self.setup.config.max_steps_in_flight:
            had_work = self.scheduler.has_work
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if plan.is_empty:
                assert self.in_flight or not had_work, "a step with work computes something"
                return
            self.check_plan(plan)
            self.in_flight.append(plan)
            self.outcome.num_ahead += len(self.in_flight) > 1

    def discard_in_flight(self) -> None:
        while self.in_flight:
            plan = self.in_flight.popleft()
            if self.setup.runs_after_failure:
                with contextlib.suppress(RuntimeError):
                    self.runner.execute(plan)
            self.scheduler.discard_step(plan)

    def check_plan(self, plan: StepPlan) -> None:
        config = self.setup.config
        assert plan.total_num_scheduled_tokens <= config.token_budget
        assert len(plan.request_ids) <= config.max_num_seqs
        assert len(set(plan.released_ids)) == len(plan.released_ids)
        if not self.in_flight and self.setup.config.max_steps_in_flight == 1:
            waits = self.decoding - {*plan.request_ids, *plan.released_ids}
            assert not waits, "a decode had to wait"
        threshold = config.long_prefill_token_threshold or config.token_budget
        assert max(plan.num_scheduled_tokens) <= threshold
        for request_id, num_computed in zip(
            plan.request_ids, plan.num_computed_tokens, strict=True
        ):
            request = self.requests[request_id]
            assert num_computed < request.num_tokens + len(self.in_flight)
            assert num_computed + 1 < request.max_num_tokens

    def abort_in_flight(self) -> None:
        for number, arrival in enumerate(self.arrivals):
            if arrival.abort_after is None or arrival.step + arrival.abort_after != self.step_idx:
                continue
            for choice in range(arrival.num_choices):
                self.scheduler.abort(f"{number}-{choice}")

    def check_that_runner_is_told_of_every_end(self) -> None:
        last = Request("last", [1, 2], SamplingParams(max_tokens=1), 0.0)
        self.scheduler.add(last)
        plan = self.scheduler.schedule()
        self.step_idx = -1
        self.scheduler.update(plan, self.runner.execute(plan))
        assert self.runner.num_rows == 1


def sampling_of(arrival: Arrival, choice: int) -> SamplingParams:
    base = arrival.sampling
    return SamplingParams(
        seed=base.seed + choice,
        max_tokens=base.max_tokens,
        min_tokens=base.min_tokens,
        eos_token_ids=base.eos_token_ids,
        stop_token_ids=base.stop_token_ids,
        num_prompt_logprobs=None if choice else base.num_prompt_logprobs,
    )


def expected_output(
    prompt: Sequence[int], sampling: SamplingParams, windows: list[int | None]
) -> tuple[list[int], FinishReason, int | str | None]:
    limit = min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))
    tokens = reference_tokens(prompt, sampling, limit, windows, VOCAB_SIZE)
    for count, token in enumerate(tokens, start=1):
        if count < sampling.min_tokens:
            continue
        if token in sampling.eos_token_ids:
            return tokens[:count], FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return tokens[:count], FinishReason.STOP, token
    return tokens, FinishReason.LENGTH, None


def check_outcome(driver: Driver) -> None:
    for number, arrival in enumerate(driver.arrivals):
        for choice in range(arrival.num_choices):
            request = driver.requests[f"{number}-{choice}"]
            events = driver.outcome.events[request.request_id]
            tokens = [token for one in events for token in one.token_ids]
            expected, reason, stop_reason = expected_output(
                arrival.prompt, request.sampling, driver.setup.windows
            )
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert tokens == expected[: len(tokens)]
                continue
            assert tokens == expected
            assert request.token_ids == arrival.prompt + expected
            assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
            assert (events[-1].finish_reason, events[-1].stop_reason) == (reason, stop_reason)
            if request.sampling.num_prompt_logprobs is not None:
                got = [entry for one in events for entry in one.prompt_logprobs or ()]
                ids = [None if entry is None else entry.token_id for entry in got]
                assert ids == [None, *arrival.prompt[1:]]


# A few beginnings that prompts share, so that the prefix cache has something to find.
BEGINNINGS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 9, 9, 9, 9], [7] * 14, []]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt = draw(st.sampled_from(BEGINNINGS)) + draw(
        st.lists(st.integers(0, 3), min_size=1, max_size=8)
    )
    max_tokens = draw(st.integers(1, 24))
    return Arrival(
        step=draw(st.integers(0, 12)),
        prompt=prompt,
        sampling=SamplingParams(
            seed=draw(st.integers(0, 3)),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            eos_token_ids=draw(st.sampled_from([(), (EOS,)])),
            stop_token_ids=draw(st.sampled_from([(), (STOP,)])),
            num_prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        ),
        num_choices=draw(st.sampled_from([1, 1, 1, 2, 3])),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from([None, None, "a"])),
        abort_after=draw(st.none() | st.integers(0, 10)),
    )


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    max_num_seqs = draw(st.integers(1, 6))
    return Setup(
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        windows=draw(
            st.sampled_from([[None], [None, 4], [None, 5, 5], [3], [1, 6], [None, None, 9, 2]])
        ),
        num_spare_blocks=draw(st.sampled_from([0, 1, 3, 8, 100])),
        config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=draw(st.integers(max_num_seqs, 24)),
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3, 5])),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
            async_scheduling=draw(st.booleans()),
        ),
        enable_prefix_caching=draw(st.booleans()),
        runs_after_failure=draw(st.booleans()),
        failing_sequences=draw(
            st.just(frozenset())
            | st.frozensets(st.tuples(st.integers(0, 20), st.sampled_from(["0-0", "1-0"])))
        ),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups(), st.lists(arrivals(), min_size=1, max_size=7))
def test_tokens_do_not_depend_on_how_they_are_scheduled(
    setup: Setup, workload: list[Arrival]
) -> None:
    driver = Driver(setup, workload)

    outcome = driver.run()

    event(f"preempted: {outcome.num_preemptions > 0}")
    event(f"prefix cache hit: {outcome.num_cached > 0}")
    event(f"forked: {outcome.num_forks > 0}")
    event(f"scheduled ahead: {outcome.num_ahead > 0}")
    check_outcome(driver)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    setups(),
    st.lists(arrivals(), min_size=2, max_size=7),
    st.frozensets(st.integers(1, 15), min_size=1, max_size=3),
)
def test_a_failed_step_spoils_nobody_elses_tokens(
    setup: Setup, workload: list[Arrival], failing_steps: frozenset[int]
) -> None:
    setup.failing_steps = failing_steps
    driver = Driver(setup, workload)

    driver.run()

    check_outcome(driver)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_scarce_blocks_lead_to_preemption_and_the_same_tokens(
    enable_prefix_caching: bool, async_scheduling: bool
) -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=async_scheduling
    )
    setup = Setup(4, [None, 6], 0, config, enable_prefix_caching)
    workload = [
        Arrival(0, [seed] * 5, SamplingParams(seed=seed, max_tokens=24)) for seed in range(4)
    ]
    driver = Driver(setup, workload)

    outcome = driver.run()

    assert outcome.num_preemptions > 0
    check_outcome(driver)
