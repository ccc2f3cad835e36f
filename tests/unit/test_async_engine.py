"""AsyncEngine with a real scheduler and a runner that computes tokens from its KV cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import (
    FinishedStep,
    FinishReason,
    GenerationRequest,
    KVCacheGroup,
    KVCacheSpec,
    OutputDelta,
    PendingStep,
    SamplingParams,
    StepPlan,
)
from llmserve.engine import AsyncEngine, Engine, EngineState, EngineStats, RequestStream
from llmserve.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    StepFailedError,
    StepOutOfMemoryError,
)
from llmserve.scheduler import Scheduler
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_runner import FakeRunner

SPEC = KVCacheSpec((KVCacheGroup((0,)),), 4, num_kv_heads=1, head_dim=1, dtype="float32")
MAX_MODEL_LEN = 64


class ControlledRunner:
    """FakeRunner that can be slow, raise in a step, lack memory, or be broken for good."""

    def __init__(self, num_blocks: int) -> None:
        self._inner = FakeRunner(SPEC, num_blocks)
        self.delay_s = 0.0
        self.num_failures = 0
        self.max_tokens_in_memory: int | None = None
        self.max_seqs_in_memory: int | None = None
        self.is_broken = False
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self.num_steps += 1
        time.sleep(self.delay_s)
        result = self._inner.execute(plan)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("kernel exploded")
        for size, limit in (
            (plan.total_num_scheduled_tokens, self.max_tokens_in_memory),
            (len(plan.request_ids), self.max_seqs_in_memory),
        ):
            if limit is not None and size > limit:
                raise StepOutOfMemoryError("no memory")
        return FinishedStep(result)

    def probe(self) -> None:
        if self.is_broken:
            raise RuntimeError("still broken")


class Setup:
    """An engine and the parts a test looks at."""

    def __init__(self, num_blocks: int = 64, *, is_async: bool = False) -> None:
        self.runner = ControlledRunner(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, async_scheduling=is_async),
            CacheConfig(block_size=4),
            SPEC,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
        )
        self.stats = EngineStats(model_name="m", max_model_len=MAX_MODEL_LEN)
        engine = Engine(self.scheduler, ByteTokenizer(), self.stats)
        self.engine = AsyncEngine(engine, self.runner, self.stats, max_model_len=MAX_MODEL_LEN)

    def generate(self, prompt: str = "hello", request_id: str = "r", n: int = 1, **kwargs: Any):
        sampling = SamplingParams(**{"max_tokens": 8, **kwargs})
        return self.engine.generate(
            GenerationRequest(request_id, list(prompt.encode()), sampling, n=n)
        )

    def sample(self, name: str, **labels: str) -> float:
        value = self.stats.registry.get_sample_value(
            "llmserve:" + name, {"model_name": "m", **labels}
        )
        assert value is not None
        return value


@pytest.fixture(params=[False, True], ids=["", "async scheduling"])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    setup = Setup(is_async=request.param)
    await setup.engine.start()
    yield setup
    await setup.engine.shutdown()


async def collect(stream: RequestStream) -> list[OutputDelta]:
    return [delta async for delta in stream]


def token_ids(deltas: list[OutputDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


async def test_stream_ends_with_a_finish_reason_and_counts_tokens(setup: Setup) -> None:
    deltas = await collect(setup.generate(max_tokens=5))

    assert sum(len(delta.token_ids) for delta in deltas) == 5
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert (deltas[-1].num_prompt_tokens, deltas[-1].num_output_tokens) == (5, 5)
    assert setup.sample("generation_tokens_total") == 5
    assert setup.sample("prompt_tokens_total") == 5
    assert setup.sample("request_success_total", finished_reason="length") == 1


async def test_requests_together_give_what_each_gives_alone(setup: Setup) -> None:
    prompts = [f"prompt {i}" * (i % 3 + 1) for i in range(12)]
    alone = [await collect(setup.generate(p, f"a{i}")) for i, p in enumerate(prompts)]

    together = await asyncio.gather(
        *(collect(setup.generate(p, f"b{i}")) for i, p in enumerate(prompts))
    )

    def tokens(deltas: list[OutputDelta]) -> list[int]:
        return [token for delta in deltas for token in delta.token_ids]

    assert list(map(tokens, together)) == list(map(tokens, alone))


async def test_stop_string_ends_the_request_and_frees_its_blocks(setup: Setup) -> None:
    whole = "".join(d.text for d in await collect(setup.generate(max_tokens=20)))
    stop = whole[4:7]

    deltas = await collect(setup.generate(request_id="s", max_tokens=20, stop=(stop,)))

    assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == stop
    await wait_for(lambda: setup.sample("kv_cache_usage_perc") == 0)
    assert not setup.scheduler.has_work


async def test_choices_are_interleaved_and_each_finishes_once(setup: Setup) -> None:
    deltas = await collect(setup.generate(n=3, temperature=1.0, max_tokens=6))

    finished = [delta.index for delta in deltas if delta.finish_reason is not None]
    assert sorted(finished) == [0, 1, 2]
    for index in range(3):
        assert sum(len(d.token_ids) for d in deltas if d.index == index) == 6


@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_client_that_leaves_frees_its_blocks(setup: Setup, num_read: int) -> None:
    setup.runner.delay_s = 0.005
    stream = setup.generate(max_tokens=50, n=2, temperature=1.0)
    for _ in range(num_read):
        await anext(stream)

    stream.abort()
    stream.abort()

    await wait_for(lambda: setup.engine.num_unfinished == 0 and not setup.scheduler.has_work)
    await wait_for(lambda: setup.sample("kv_cache_usage_perc") == 0)
    assert setup.sample("request_success_total", finished_reason="abort") == 2


async def test_queued_request_can_be_aborted() -> None:
    setup = Setup()
    await setup.engine.start()
    setup.runner.delay_s = 0.01
    running = [setup.generate(request_id=f"r{i}", max_tokens=30) for i in range(8)]
    queued = setup.generate(request_id="q", max_tokens=30)
    await anext(running[0])

    queued.abort()

    assert all(len(deltas) >= 29 for deltas in await asyncio.gather(*map(collect, running)))
    assert await collect(queued) == []
    await setup.engine.shutdown()


async def test_failed_step_fails_its_requests_only(setup: Setup) -> None:
    setup.runner.num_failures = 1

    with pytest.raises(StepFailedError, match="RuntimeError"):
        await collect(setup.generate(request_id="bad"))

    deltas = await collect(setup.generate(request_id="good"))
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert setup.engine.state is EngineState.READY
    assert setup.sample("kv_cache_usage_perc") == 0
    assert setup.sample("request_success_total", finished_reason="error") == 1


async def test_step_that_lacks_memory_begins_anew_in_smaller_ones(setup: Setup) -> None:
    prompt = "a prompt of more than sixteen bytes"
    expected = await collect(setup.generate(prompt, "before"))
    setup.runner.max_tokens_in_memory = 16

    streams = [setup.generate(prompt[1:], f"r{i}") for i in range(4)]
    results = await asyncio.gather(*map(collect, streams))
    again = await collect(setup.generate(prompt, "after"))

    assert all(deltas[-1].finish_reason is FinishReason.LENGTH for deltas in results)
    assert token_ids(again) == token_ids(expected)
    assert setup.engine.state is EngineState.READY


@pytest.mark.parametrize("limit", [4, 7])
async def test_decodes_that_lack_memory_run_in_two_halves(setup: Setup, limit: int) -> None:
    prompts = [f"{i}" for i in range(8)]
    expected = [token_ids(await collect(setup.generate(p, "before"))) for p in prompts]
    streams = [setup.generate(prompt, f"r{i}") for i, prompt in enumerate(prompts)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    setup.runner.max_seqs_in_memory = limit

    results = await asyncio.gather(*map(collect, streams))

    assert [token_ids(deltas) for deltas in results] == [tokens[1:] for tokens in expected]
    assert all(deltas[-1].finish_reason is FinishReason.LENGTH for deltas in results)
    assert setup.sample("kv_cache_usage_perc") == 0


async def test_step_that_lacks_memory_twice_fails_its_requests_only(setup: Setup) -> None:
    setup.runner.max_tokens_in_memory = 0

    with pytest.raises(StepFailedError, match="StepOutOfMemoryError"):
        await collect(setup.generate(request_id="bad"))

    setup.runner.max_tokens_in_memory = None
    deltas = await collect(setup.generate(request_id="good"))
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert setup.sample("kv_cache_usage_perc") == 0


async def test_broken_executor_makes_the_engine_report_dead(setup: Setup) -> None:
    setup.runner.delay_s = 0.01
    streams = [setup.generate(request_id=f"r{i}", max_tokens=40) for i in range(12)]
    await anext(streams[0])
    setup.runner.num_failures = 1
    setup.runner.is_broken = True

    results = await asyncio.gather(*map(collect, streams), return_exceptions=True)

    assert all(isinstance(r, StepFailedError | EngineDeadError) for r in results)
    assert any(isinstance(r, EngineDeadError) for r in results)
    assert setup.engine.state is EngineState.DEAD
    with pytest.raises(EngineDeadError):
        setup.generate(request_id="late")


async def test_drain_finishes_running_requests_and_refuses_new_ones(setup: Setup) -> None:
    setup.runner.delay_s = 0.01
    stream = setup.generate(max_tokens=20)
    draining = asyncio.create_task(setup.engine.drain(10))
    await asyncio.sleep(0)

    with pytest.raises(EngineDrainingError):
        setup.generate(request_id="late")

    deltas = await collect(stream)
    await draining
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_drain_aborts_at_its_deadline(setup: Setup) -> None:
    setup.runner.delay_s = 0.02
    stream = setup.generate(max_tokens=50)
    await anext(stream)

    await setup.engine.drain(0.1)

    deltas = await collect(stream)
    assert deltas[-1].finish_reason is FinishReason.ABORT
    await wait_for(lambda: setup.sample("kv_cache_usage_perc") == 0)


async def test_idle_engine_runs_no_steps(setup: Setup) -> None:
    await collect(setup.generate())
    before = setup.runner.num_steps

    await asyncio.sleep(0.1)

    assert setup.runner.num_steps == before


async def test_prompt_that_leaves_no_room_is_refused_at_once(setup: Setup) -> None:
    with pytest.raises(ContextLengthError, match="64"):
        setup.generate("x" * MAX_MODEL_LEN)


async def test_event_loop_runs_while_a_step_does(setup: Setup) -> None:
    setup.runner.delay_s = 0.5
    reading = asyncio.create_task(collect(setup.generate(max_tokens=1)))
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0.002)
        num_turns += 1

    assert num_turns > 10  # two or three, if the step held the loop


async def test_request_that_cannot_be_queued_fails_alone(setup: Setup) -> None:
    setup.runner.delay_s = 0.01
    first = setup.generate(request_id="same", max_tokens=10)
    await anext(first)

    with pytest.raises(EngineError, match="queued"):
        await collect(setup.generate(request_id="same"))

    assert (await collect(first))[-1].finish_reason is FinishReason.LENGTH
    assert setup.engine.state is EngineState.READY
