"""Beam search finds the sequences that transformers' generate(num_beams=...) finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llmserve.core import (
    BeamParams,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    SamplingParams,
)
from llmserve.engine import AsyncEngine
from tests.golden.tiny_async_engine import running_engine
from tests.golden.tiny_engine import make_prompts
from tests.make_checkpoints import VOCAB_SIZE

Checkpoint = tuple[PreTrainedModel, Path]

PROMPTS = make_prompts([1, 7, 16, 33], VOCAB_SIZE, seed=3)
# Every 16th token ends a text, so that beams end early and at different lengths.
ENDS = tuple(range(5, VOCAB_SIZE, 16))


def reference(
    model: PreTrainedModel, prompt: list[int], width: int, num_tokens: int, **options: Any
) -> list[list[int]]:
    """The beams of transformers, best first, without what fills up the shorter ones."""
    token_ids = torch.tensor([prompt])
    with torch.inference_mode():
        beams = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return [_cut(row, options.get("eos_token_id")) for row in beams[:, len(prompt) :].tolist()]


def _cut(row: list[int], ends: list[int] | None) -> list[int]:
    place = next((i for i, token in enumerate(row) if token in (ends or ())), len(row))
    return row[: place + 1]


async def search(
    engine: AsyncEngine,
    prompt: list[int],
    width: int,
    length_penalty: float = 1.0,
    **sampling: Any,
) -> list[OutputDelta]:
    request = GenerationRequest(
        request_id=f"{len(prompt)}-{width}-{length_penalty}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        n=width,
        beam=BeamParams(width, length_penalty),
    )
    return [delta async for delta in engine.generate(request)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_beams_equal_those_of_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint(name)
    expected = [reference(model, prompt, 4, 20, eos_token_id=None) for prompt in PROMPTS]

    async with running_engine(folder) as engine:
        results = await asyncio.gather(
            *(search(engine, prompt, 4, max_tokens=20) for prompt in PROMPTS)
        )

    assert [[delta.token_ids for delta in result] for result in results] == expected


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [2, 5])
async def test_finished_beams_equal_those_of_transformers(
    width: int, length_penalty: float, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint("llama")
    expected = [
        reference(
            model,
            prompt,
            width,
            16,
            length_penalty=length_penalty,
            eos_token_id=list(ENDS),
        )
        for prompt in PROMPTS
    ]

    async with running_engine(folder) as engine:
        results = [
            await search(engine, prompt, width, length_penalty, max_tokens=16, eos_token_ids=ENDS)
            for prompt in PROMPTS
        ]

    assert [[delta.token_ids for delta in result] for result in results] == expected
    reasons = {delta.finish_reason for result in results for delta in result}
    assert FinishReason.STOP in reasons or length_penalty > 1


async def test_min_tokens_keeps_beams_from_ending(checkpoint: Callable[[str], Checkpoint]) -> None:
    model, folder = checkpoint("llama")
    # Without a penalty short beams are best, so that they would end early.
    options = {"eos_token_id": list(ENDS), "length_penalty": 0.0}
    short = reference(model, PROMPTS[1], 3, 12, **options)
    expected = reference(model, PROMPTS[1], 3, 12, min_new_tokens=6, **options)

    async with running_engine(folder) as engine:
        result = await search(
            engine, PROMPTS[1], 3, 0.0, max_tokens=12, min_tokens=6, eos_token_ids=ENDS
        )

    assert [delta.token_ids for delta in result] == expected
    assert expected != short


async def test_stop_string_ends_a_beam_as_a_token_does(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model, folder = checkpoint("llama")
    expected = reference(model, PROMPTS[1], 3, 12, eos_token_id=list(ENDS), length_penalty=0.0)
    stops = tuple(f"<{token_id}>" for token_id in ENDS)

    async with running_engine(folder) as engine:
        result = await search(engine, PROMPTS[1], 3, 0.0, max_tokens=12, stop=stops)

    assert [delta.token_ids for delta in result] == expected
    assert FinishReason.STOP in {delta.finish_reason for delta in result}
    for delta in result:
        is_stopped = delta.finish_reason is FinishReason.STOP
        shown = delta.token_ids[:-1] if is_stopped else delta.token_ids
        assert delta.text == "".join(f"<{token_id}>" for token_id in shown)
        assert (delta.stop_reason in stops) == is_stopped


async def test_rows_of_beams_are_the_models_logprobs(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model, folder = checkpoint("llama")

    async with running_engine(folder) as engine:
        result = await search(engine, PROMPTS[3], 3, max_tokens=6, num_logprobs=2)

    for delta in result:
        whole = torch.tensor([[*PROMPTS[3], *delta.token_ids]])
        with torch.inference_mode():
            logprobs = model(whole).logits[0, len(PROMPTS[3]) - 1 : -1].log_softmax(-1)
        for row, token_id, expected in zip(delta.logprobs, delta.token_ids, logprobs, strict=True):
            assert row.token_id == token_id
            assert row.logprob == pytest.approx(float(expected[token_id]), abs=1e-3)
            assert row.rank == int((expected > expected[token_id]).sum()) + 1
            assert list(row.top_ids) == expected.topk(2).indices.tolist()
