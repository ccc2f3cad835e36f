"""Asynchronous scheduling changes no token, no text and no end, however results come in.

Each example runs a workload through two engines, with and without it, over a runner as asynchronous
as a GPU's, at delays that hypothesis chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, event, given, settings

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import (
    FinishReason,
    GenerationRequest,
    KVCacheGroup,
    KVCacheSpec,
    Request,
    SamplingParams,
)
from llmserve.engine import AsyncEngine, Engine, EngineState, EngineStats, RequestStream
from llmserve.errors import StepFailedError
from llmserve.executor import UniprocExecutor
from llmserve.scheduler import Scheduler
from tests.async_runner import AsyncRunner
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_runner import FakeRunner

VOCAB_SIZE = 24
EOS = 5
MAX_MODEL_LEN = 48
BLOCK_SIZE = 4


@dataclass
class Arrival:
    """A request that comes `delay_s` after the one before; its client leaves after `num_read`
    deltas, where that is set."""

    delay_s: float
    prompt: list[int]
    sampling: SamplingParams
    n: int
    num_read: int | None


@dataclass
class Setup:
    windows: list[int | None]
    num_blocks: int
    scheduler: dict[str, int]
    delays_s: list[float]
    enable_prefix_caching: bool = True
    failing_steps: frozenset[int] = frozenset()
    failing_launches: frozenset[int] = frozenset()


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: tuple[FinishReason | None, int | str | None] | None = None


@dataclass
class Answer:
    choices: list[Choice]
    has_left: bool = False
    has_failed: bool = False


class Run:
    """One engine, and the workload through it."""

    def __init__(self, setup: Setup, *, is_async: bool) -> None:
        groups = tuple(KVCacheGroup((i,), window) for i, window in enumerate(setup.windows))
        spec = KVCacheSpec(groups, BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")
        inner = FakeRunner(
            spec,
            setup.num_blocks,
            vocab_size=VOCAB_SIZE,
            fails=lambda plan: inner.num_steps in setup.failing_steps,
        )
        self.runner = AsyncRunner(inner, setup.delays_s, setup.failing_launches)
        self.scheduler = Scheduler(
            SchedulerConfig(async_scheduling=is_async, **setup.scheduler),
            CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=setup.enable_prefix_caching),
            spec,
            num_blocks=setup.num_blocks,
            max_model_len=MAX_MODEL_LEN,
        )
        stats = EngineStats(model_name="m", max_model_len=MAX_MODEL_LEN)
        engine = Engine(self.scheduler, ByteTokenizer(), stats, log_requests=False)
        self.engine = AsyncEngine(
            engine, UniprocExecutor(self.runner), stats, max_model_len=MAX_MODEL_LEN
        )

    async def answers(self, arrivals: list[Arrival]) -> list[Answer]:
        await self.engine.start()
        tasks = []
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(arrival.delay_s)
            request = GenerationRequest(f"r{number}", arrival.prompt, arrival.sampling, n=arrival.n)
            tasks.append(asyncio.create_task(read(self.engine.generate(request), arrival)))
        answers = await asyncio.gather(*tasks)
        await self.settle()
        return answers

    async def settle(self) -> None:
        """Everything is given back, and a request that comes now leaves the runner one row."""
        assert self.engine.state is EngineState.READY
        for _ in range(5000):
            if not self.scheduler.has_work and not self.scheduler.kv_cache_usage:
                break
            await asyncio.sleep(0.002)
        assert self.scheduler.kv_cache_usage == 0
        self.scheduler.check_integrity()
        await self.engine.shutdown()
        self.runner.close()
        self.scheduler.add(Request("last", [1, 2], SamplingParams(max_tokens=1), 0.0))
        with contextlib.suppress(RuntimeError):
            self.runner.inner.execute(self.scheduler.schedule())
        assert self.runner.inner.num_rows == 1


async def read(stream: RequestStream, arrival: Arrival) -> Answer:
    answer = Answer([Choice() for _ in range(arrival.n)])
    num_read = 0
    try:
        async for delta in stream:
            choice = answer.choices[delta.index]
            assert choice.end is None
            choice.token_ids += delta.token_ids
            choice.text += delta.text
            assert delta.num_output_tokens == len(choice.token_ids)
            if delta.finish_reason is not None:
                choice.end = (delta.finish_reason, delta.stop_reason)
            num_read += 1
            if num_read == arrival.num_read:
                stream.abort()
                answer.has_left = True
                return answer
    except StepFailedError:
        answer.has_failed = True
    return answer


def compare(mine: Answer, other: Answer) -> None:
    for one, two in zip(mine.choices, other.choices, strict=True):
        if mine.has_left or mine.has_failed or other.has_left or other.has_failed:
            length = min(len(one.token_ids), len(two.token_ids))
            assert one.token_ids[:length] == two.token_ids[:length]
        else:
            assert one.end is not None
            assert one == two


BEGINNINGS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 9, 9], [7] * 9, []]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt = draw(st.sampled_from(BEGINNINGS)) + draw(
        st.lists(st.integers(0, 3), min_size=1, max_size=6)
    )
    max_tokens = draw(st.integers(1, 24))
    return Arrival(
        delay_s=draw(st.sampled_from([0.0, 0.0, 0.002, 0.01])),
        prompt=prompt,
        sampling=SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            eos_token_ids=draw(st.sampled_from([(), (EOS,)])),
            stop=draw(st.sampled_from([(), ("\x03",), ("\x07", "\x02\x01")])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
            num_logprobs=draw(st.sampled_from([None, 0])),
        ),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        num_read=draw(st.none() | st.integers(1, 6)),
    )


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    max_num_seqs = draw(st.integers(1, 6))
    windows = draw(st.sampled_from([[None], [None, 5], [3]]))
    return Setup(
        windows=windows,
        # 12 blocks hold the longest sequence of a group.
        num_blocks=1 + len(windows) * draw(st.sampled_from([13, 14, 20, 60])),
        scheduler={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": draw(st.integers(max_num_seqs, 24)),
        },
        delays_s=draw(
            st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.0005, 0.003]), min_size=1, max_size=7)
        ),
        enable_prefix_caching=draw(st.booleans()),
    )


def run_both(setup: Setup, workload: list[Arrival]) -> list[Run]:
    runs = [Run(setup, is_async=is_async) for is_async in (True, False)]
    answers = [asyncio.run(run.answers(workload)) for run in runs]
    for mine, other in zip(*answers, strict=True):
        compare(mine, other)
    return runs


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups(), st.lists(arrivals(), min_size=1, max_size=6))
def test_outputs_are_the_same_with_and_without(setup: Setup, workload: list[Arrival]) -> None:
    (run, _) = run_both(setup, workload)

    event(f"preempted: {run.scheduler.num_preemptions > 0}")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    setups(),
    st.lists(arrivals(), min_size=2, max_size=6),
    st.frozensets(st.integers(0, 15), max_size=2),
    st.frozensets(st.integers(0, 15), max_size=2),
)
def test_failed_steps_spoil_nobody_elses_output(
    setup: Setup,
    workload: list[Arrival],
    failing_steps: frozenset[int],
    failing_launches: frozenset[int],
) -> None:
    setup.failing_steps = failing_steps
    setup.failing_launches = failing_launches
    run_both(setup, workload)


def test_scarce_blocks_lead_to_preemption_and_the_same_output() -> None:
    setup = Setup([None, 5], 27, {"max_num_seqs": 5, "max_num_batched_tokens": 16}, [0.0, 0.001])
    workload = [
        Arrival(0.0, [seed] * (5 + seed), SamplingParams(seed=seed, max_tokens=24), 1, None)
        for seed in range(5)
    ]

    runs = run_both(setup, workload)

    assert all(run.scheduler.num_preemptions > 0 for run in runs)


def test_a_step_is_launched_while_another_one_computes() -> None:
    setup = Setup([None], 60, {"max_num_seqs": 4, "max_num_batched_tokens": 16}, [0.0])

    async def num_launched(*, is_async: bool) -> int:
        run = Run(setup, is_async=is_async)
        run.runner.may_compute.clear()
        arrival = Arrival(0.0, [1, 2, 3], SamplingParams(max_tokens=9), 1, None)
        task = asyncio.create_task(run.answers([arrival]))
        await asyncio.sleep(0.2)
        launched = len(run.runner.launched)
        run.runner.may_compute.set()
        (answer,) = await task
        assert len(answer.choices[0].token_ids) == 9
        assert len(run.runner.launched) == 9, "no step behind the last token"
        return launched

    assert asyncio.run(num_launched(is_async=True)) == 2
    assert asyncio.run(num_launched(is_async=False)) == 1


def test_dependent_sequences_are_launched_when_their_tokens_are_known() -> None:
    setup = Setup([None], 60, {"max_num_seqs": 4, "max_num_batched_tokens": 16}, [0.0, 0.001])
    workload = [
        Arrival(0.0, [1, 2], SamplingParams(max_tokens=8, presence_penalty=1.0), 1, None),
        Arrival(0.0, [3, 4], SamplingParams(max_tokens=16), 1, None),
    ]

    (run, _) = run_both(setup, workload)

    # While the first one runs the host has to know what it said, and not any longer.
    needs = [plan.needs_last_result for plan in run.runner.launched]
    assert any(needs[:8])
    assert not any(needs[10:])
