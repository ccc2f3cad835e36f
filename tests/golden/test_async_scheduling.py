"""Asynchronous scheduling changes no bit of what the CPU's runner gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from llmserve.core import FinishReason, GenerationRequest, SamplingParams
from llmserve.engine import AsyncEngine
from tests.golden.tiny_async_engine import running_engine
from tests.golden.tiny_engine import Output, TinyEngine, make_prompts
from tests.make_checkpoints import ARCHITECTURES, VOCAB_SIZE, make_model, save_checkpoint
from tests.make_gguf import save_gguf

MAX_MODEL_LEN = 128
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=24, num_logprobs=3),
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=30),
    SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=tuple(range(3, 90))),
    SamplingParams(temperature=1.0, seed=3, max_tokens=25, eos_token_ids=tuple(range(90, 140))),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.0, max_tokens=12, bad_words_token_ids=((4,), (5, 6))),
    SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=9, max_tokens=40, min_tokens=9, num_prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "m.gguf"
    kind = GGMLQuantizationType.Q8_0
    save_gguf(make_model(ARCHITECTURES["gemma3"]), path, "gemma3", quantization=kind)
    return path


@pytest.mark.parametrize(
    ("budget", "num_blocks"), [(512, None), (9, None), (32, 60)], ids=["", "chunks", "preemption"]
)
def test_outputs_are_equal(quantised: Path, budget: int, num_blocks: int | None) -> None:
    prompts = make_prompts([5, 16, 17, 45, 3, 60, 33, 40] * 2, VOCAB_SIZE)
    prompts[9] = [*prompts[3], 1, 2]
    outputs: list[list[Output]] = []
    preemptions = []
    for is_async in (True, False):
        engine = TinyEngine(
            quantised,
            cache={"num_gpu_blocks_override": num_blocks},
            scheduler={
                "max_num_seqs": 9,
                "max_num_batched_tokens": budget,
                "async_scheduling": is_async,
            },
            max_model_len=MAX_MODEL_LEN,
        )
        given = engine.generate_each(prompts, SAMPLING * 2)
        given += engine.generate_choices(prompts[4], 3, 20)
        preemptions.append(engine.scheduler.num_preemptions)
        assert engine.scheduler.kv_cache_usage == 0
        outputs.append([_without_cache_counts(output) for output in given])

    assert outputs[0] == outputs[1]
    assert all(count > 0 for count in preemptions) == (num_blocks is not None)


def _without_cache_counts(output: Output) -> Output:
    """What the prefix cache gives depends on when a request starts."""
    output.num_cached_tokens = 0
    return output


async def _choices(engine: AsyncEngine, number: int, prompt: list[int]) -> list[str]:
    """Texts and ends of a request; every third client leaves after some deltas."""
    sampling = SamplingParams(
        temperature=float(number % 2),
        seed=number,
        max_tokens=20 + number,
        stop=("<7>", "<21><") if number % 4 == 1 else (),
        repetition_penalty=1.2 if number % 5 == 2 else 1.0,
    )
    stream = engine.generate(GenerationRequest(f"r{number}", prompt, sampling, n=1 + number % 2))
    texts = [""] * (1 + number % 2)
    num_read = 0
    async for delta in stream:
        texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            assert delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            texts[delta.index] += f" {delta.finish_reason.value} {delta.stop_reason}"
        num_read += 1
        if number % 3 == 2 and num_read == number:
            stream.abort()
            return []
    return texts


async def _run(model: Path, prompts: Sequence[list[int]], *, is_async: bool) -> list[list[str]]:
    async with running_engine(model, async_scheduling=is_async, max_num_seqs=6) as engine:
        texts = await asyncio.gather(
            *(_choices(engine, number, prompt) for number, prompt in enumerate(prompts))
        )
        await engine.drain(10)
    return texts


async def test_texts_and_ends_are_equal_through_the_threads(tmp_path: Path) -> None:
    save_checkpoint(make_model(ARCHITECTURES["llama"]), tmp_path)
    prompts = make_prompts([5, 16, 30, 45, 3, 9, 33, 40, 7, 12], VOCAB_SIZE)

    first, second = [await _run(tmp_path, prompts, is_async=on) for on in (True, False)]

    assert first == second
