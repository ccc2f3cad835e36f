"""Log-likelihoods as lm-evaluation-harness asks for them (its `local-completions` model), against
transformers in float32.

The harness sends batches of token ids, context and continuation in one, with echo, logprobs and
one token to generate; it sums the rows of the continuation, the generated token left out, and
calls a continuation greedy if each of its tokens is the likeliest of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.golden.reference import greedy, logits
from tests.golden.tiny_async_engine import serving_checkpoint
from tests.golden.tiny_engine import make_prompts
from tests.make_checkpoints import VOCAB_SIZE

Checkpoint = tuple[PreTrainedModel, Path]


def make_payload(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def read_answer(
    answer: dict[str, Any], num_context_tokens: list[int], max_tokens: int
) -> list[tuple[float, bool]]:
    """(log-likelihood, is greedy) of each continuation."""
    results = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, start in zip(choices, num_context_tokens, strict=True):
        rows = choice["logprobs"]
        end = len(rows["token_logprobs"]) - max_tokens
        values = rows["token_logprobs"][start:end]
        bests = [max(top.values()) for top in rows["top_logprobs"][start:end]]
        results.append((sum(values), values == bests))
    return results


def reference(
    model: PreTrainedModel, context: list[int], continuation: list[int]
) -> tuple[float, bool]:
    whole = logits(model, [*context, *continuation]).log_softmax(-1)[len(context) - 1 : -1]
    values = whole.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return float(values.sum()), whole.argmax(-1).tolist() == continuation


async def ask(session: aiohttp.ClientSession, payload: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/v1/completions", json=payload) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def make_cases(model: PreTrainedModel) -> list[tuple[list[int], list[int]]]:
    """Contexts with random continuations, and with the greedy ones."""
    contexts = make_prompts([1, 5, 16, 40, 90], VOCAB_SIZE, seed=11)
    rng = np.random.default_rng(12)
    random = [rng.integers(3, VOCAB_SIZE, size=7).tolist() for _ in contexts]
    return [
        *zip(contexts, random, strict=True),
        *zip(contexts, greedy(model, contexts, 5), strict=True),
    ]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
async def test_loglikelihoods_equal_those_of_transformers(
    name: str, max_tokens: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint(name)
    cases = make_cases(model)
    expected = [reference(model, *case) for case in cases]

    # Prompts are computed in chunks of at most 48 tokens, some of them of several prompts.
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    async with serving_checkpoint(folder, scheduler=sizes) as session:
        payload = make_payload([context + rest for context, rest in cases], max_tokens)
        answers = [await ask(session, payload) for _ in range(2)]  # the second with a warm cache

    lengths = [len(context) for context, _ in cases]
    for answer in answers:
        results = read_answer(answer, lengths, max_tokens)
        for (value, is_greedy), (expected_value, expected_greedy) in zip(
            results, expected, strict=True
        ):
            assert value == pytest.approx(expected_value, abs=1e-3)
            assert is_greedy == expected_greedy
    assert {is_greedy for _, is_greedy in expected} == {True, False}


async def test_every_row_equals_that_of_transformers(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model, folder = checkpoint("llama")
    [prompt] = make_prompts([60], VOCAB_SIZE, seed=5)
    rows = logits(model, prompt).log_softmax(-1)

    async with serving_checkpoint(folder) as session:
        answer = await ask(session, make_payload([prompt], 1))

    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][:-1] == [f"<{token_id}>" for token_id in prompt]
    assert logprobs["token_logprobs"][0] is None
    for position in range(1, len(prompt)):
        row, token_id = rows[position - 1], prompt[position]
        best = int(row.argmax())
        assert logprobs["token_logprobs"][position] == pytest.approx(float(row[token_id]), abs=1e-3)
        assert set(logprobs["top_logprobs"][position]) == {f"<{best}>", f"<{token_id}>"}


async def test_logprobs_of_the_whole_vocabulary_sum_to_one(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model, folder = checkpoint("llama")
    [prompt] = make_prompts([9], VOCAB_SIZE, seed=6)
    expected = logits(model, prompt).log_softmax(-1)[-1]

    async with serving_checkpoint(folder, max_logprobs=-1) as session:
        answer = await ask(
            session,
            {"prompt": prompt, "max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1},
        )

    choice = answer["choices"][0]
    [top] = choice["logprobs"]["top_logprobs"]
    assert len(top) == VOCAB_SIZE
    assert float(np.exp(list(top.values())).sum()) == pytest.approx(1.0, abs=1e-6)
    assert all(
        top[f"<{token_id}>"] == pytest.approx(float(value), abs=1e-3)
        for token_id, value in enumerate(expected)
    )
    assert [len(row) for row in choice["prompt_logprobs"][1:]] == [VOCAB_SIZE] * 8
