"""Sampler: what each parameter does to a sequence's tokens, and what state it keeps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.core import SamplingParams, SeqResult, TokenLogprobs
from llmserve.kernels import CPUKernels
from llmserve.runner.sampler import Sampler

VOCAB_SIZE = 50


def make_logits(num_rows: int = 1, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def make_sampler(
    *, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> Sampler:
    sampler = Sampler(CPUKernels())
    sampler.add("a", SamplingParams(**params), prompt or [1, 2, 3], output or [])
    return sampler


def generate(sampler: Sampler, num_tokens: int, request_id: str = "a", start: int = 0) -> list[int]:
    """Tokens for logits that depend on the step alone."""
    tokens = []
    for step in range(start, start + num_tokens):
        (result,) = sampler.sample(make_logits(seed=step), [request_id])
        tokens.extend(result.token_ids)
    return tokens


def likely(*ids: int) -> torch.Tensor:
    """One row in which these tokens are the most likely ones, in this order."""
    logits = torch.zeros(1, VOCAB_SIZE)
    for place, token_id in enumerate(ids):
        logits[0, token_id] = 30.0 - place
    return logits


def choose(sampler: Sampler, *ids: int) -> int:
    (result,) = sampler.sample(likely(*ids), ["a"])
    return result.token_ids[0]


def edited(sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """The row of logits after masks, bias and penalties, as it was sampled from."""
    row = logits.clone()
    sampler.sample(row, ["a"])
    return row[0].double()


def test_greedy_takes_the_most_likely_token() -> None:
    sampler = make_sampler(temperature=0.0)
    logits = make_logits(seed=4)

    (result,) = sampler.sample(logits.clone(), ["a"])

    assert result == SeqResult((int(logits.argmax()),))


def test_the_same_seed_gives_the_same_tokens() -> None:
    first = generate(make_sampler(seed=7), 30)

    assert generate(make_sampler(seed=7), 30) == first
    assert generate(make_sampler(seed=8), 30) != first
    assert generate(make_sampler(seed=-7), 30) != first


def test_a_resumed_sequence_draws_what_it_would_have_drawn() -> None:
    params: dict[str, Any] = {"seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    whole = generate(make_sampler(**params), 20)

    resumed = make_sampler(output=whole[:8], **params)

    assert generate(resumed, 12, start=8) == whole[8:]


def test_a_sequence_draws_the_same_tokens_alone_and_among_others() -> None:
    alone = generate(make_sampler(seed=3, top_p=0.9, num_logprobs=2), 10)
    sampler = make_sampler(seed=3, top_p=0.9, num_logprobs=2)
    others = [f"other{i}" for i in range(40)]
    for i, request_id in enumerate(others):
        temperature, penalty = float(i % 2), i % 3 * 0.5
        sampling = SamplingParams(seed=i, temperature=temperature, presence_penalty=penalty)
        sampler.add(request_id, sampling, [4, 5], [6])

    among = []
    for step in range(10):
        logits = make_logits(41, seed=100 + step)
        logits[20] = make_logits(seed=step)[0]
        results = sampler.sample(logits, [*others[:20], "a", *others[20:]])
        among.extend(results[20].token_ids)

    assert among == alone


def test_an_id_that_comes_back_starts_anew() -> None:
    sampler = make_sampler(seed=3, presence_penalty=1.0)
    first = generate(sampler, 5)

    sampler.remove("a")
    sampler.remove("never added")
    sampler.add("a", SamplingParams(seed=3, presence_penalty=1.0), [1, 2, 3], [])
    second = generate(sampler, 5)
    sampler.add("a", SamplingParams(seed=3, presence_penalty=1.0), [1, 2, 3], [])
    third = generate(sampler, 5)

    assert first == second == third


def test_sequences_that_follow_a_removed_one_do_not_share_its_place() -> None:
    sampler = make_sampler()
    sampler.remove("a")
    seeds = {str(seed): seed for seed in range(40)}
    for request_id, seed in seeds.items():
        sampler.add(request_id, SamplingParams(seed=seed), [1], [])

    tokens = {request_id: generate(sampler, 6, request_id) for request_id in seeds}

    assert tokens == {i: generate(make_sampler(seed=seed), 6) for i, seed in seeds.items()}


def test_an_unknown_id_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        make_sampler().sample(make_logits(), ["b"])


def test_no_rows_give_no_results() -> None:
    assert make_sampler().sample(torch.empty(0, VOCAB_SIZE), []) == []


@settings(deadline=None, max_examples=50)
@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60),
    repetition=st.floats(0.5, 2.0),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=5),
    num_resumed=st.integers(0, 60),
)
def test_penalties_and_bias_follow_the_formula(
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    num_resumed: int,
) -> None:
    params: dict[str, Any] = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "logit_bias": tuple(bias.items()),
        "temperature": 0.0,
    }
    logits = make_logits(seed=len(prompt))
    forced = make_sampler(prompt=prompt, output=output[:num_resumed], **params)
    for token_id in output[num_resumed:]:
        row = torch.full((1, VOCAB_SIZE), -1e6)
        row[0, token_id] = 1e6
        assert forced.sample(row, ["a"])[0].token_ids == (token_id,)

    result = edited(forced, logits)

    expected = logits[0].double()
    for token_id, value in bias.items():
        expected[token_id] += value
    for token_id in {*prompt, *output}:
        value = expected[token_id].item()
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(output).items():
        expected[token_id] -= frequency * count + presence
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-4)


def test_presence_and_frequency_penalties_leave_prompt_tokens_alone() -> None:
    sampler = make_sampler(prompt=[5], presence_penalty=2.0, frequency_penalty=2.0)
    logits = make_logits()

    assert torch.equal(edited(sampler, logits), logits[0].double())


def test_logit_bias_can_force_and_ban_a_token() -> None:
    sampler = make_sampler(temperature=0.0, logit_bias=((9, 100.0), (5, -100.0)))

    assert choose(sampler, 5, 6) == 9


def test_only_allowed_tokens_are_sampled() -> None:
    sampler = make_sampler(allowed_token_ids=(4, 8, 15))

    tokens = generate(sampler, 50)

    assert set(tokens) == {4, 8, 15}


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    sampler = make_sampler(temperature=0.0, bad_words_token_ids=((5,),))

    assert [choose(sampler, 5, 6), choose(sampler, 5, 7)] == [6, 7]


def test_a_longer_bad_word_loses_its_last_token_after_the_others() -> None:
    sampler = make_sampler(temperature=0.0, prompt=[1, 2], bad_words_token_ids=((1, 2, 3),))

    # The prompt's 1, 2 does not count; neither does 2 without 1, nor what came in between.
    tokens = [choose(sampler, token_id, 9) for token_id in (3, 2, 3, 1, 2, 3, 3)]

    assert tokens == [3, 2, 3, 1, 2, 9, 3]


def test_min_tokens_holds_back_every_way_to_stop() -> None:
    sampler = make_sampler(
        temperature=0.0, min_tokens=3, eos_token_ids=(5, 6), stop_token_ids=(7,), output=[1]
    )

    tokens = [choose(sampler, 5, 7, 6, 8) for _ in range(3)]

    assert tokens == [8, 8, 5]


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    sampler = make_sampler(
        prompt=[1, 1000, -3],
        temperature=0.0,
        min_tokens=5,
        stop_token_ids=(-1, 1000, 5),
        logit_bias=((1000, 5.0), (VOCAB_SIZE, 5.0), (-2, 100.0)),
        allowed_token_ids=(4, 5, VOCAB_SIZE - 1, 1000),
        bad_words_token_ids=((1000,), (4,)),
        repetition_penalty=1.2,
    )

    assert choose(sampler, 5, 4, VOCAB_SIZE - 1) == VOCAB_SIZE - 1


def test_a_row_with_nan_fails_alone() -> None:
    sampler = make_sampler(seed=1)
    sampler.add("b", SamplingParams(seed=2, num_logprobs=1), [1], [])
    sampler.add("c", SamplingParams(seed=3, num_logprobs=1), [1], [])
    logits = make_logits(3)
    logits[1, 7] = torch.nan

    results = sampler.sample(logits, ["a", "b", "c"])

    assert results[1] == SeqResult(error="the model's logits hold NaN or infinity")
    assert [len(result.token_ids) for result in results] == [1, 0, 1]
    assert [len(result.logprobs) for result in results] == [0, 0, 1]
    assert [result.error for result in (results[0], results[2])] == [None, None]


def test_a_failed_row_does_not_count_as_output() -> None:
    sampler = make_sampler(seed=1, presence_penalty=1.0)

    sampler.sample(torch.full((1, VOCAB_SIZE), torch.nan), ["a"])

    assert generate(sampler, 10) == generate(make_sampler(seed=1, presence_penalty=1.0), 10)


def test_masks_that_leave_no_token_fail_the_sequence() -> None:
    sampler = make_sampler(allowed_token_ids=(5,), min_tokens=1, eos_token_ids=(5,))

    (result,) = sampler.sample(make_logits(), ["a"])

    assert result.error is not None
    assert "every token of the vocabulary is masked" in result.error


def check_logprobs(entry: TokenLogprobs, raw: torch.Tensor, token_id: int, k: int) -> None:
    expected = torch.log_softmax(raw.double(), dim=-1)
    order = np.argsort(-expected.numpy(), kind="stable").tolist()
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(expected[token_id].item(), rel=0, abs=1e-6)
    assert entry.rank == order.index(token_id) + 1
    assert entry.top_ids == tuple(order[:k])
    assert entry.top_logprobs == pytest.approx(expected[order[:k]].tolist(), rel=0, abs=1e-6)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampler = Sampler(CPUKernels())
    num_logprobs = [0, 3, None, 5, 100]
    for i, k in enumerate(num_logprobs):
        sampling = SamplingParams(
            seed=i,
            temperature=0.5,
            num_logprobs=k,
            allowed_token_ids=(4, 5, 6) if i % 2 else None,
            logit_bias=((9, 50.0),),
        )
        sampler.add(str(i), sampling, [1], [])
    logits = make_logits(5, seed=2)

    results = sampler.sample(logits.clone(), [str(i) for i in range(5)])

    for raw, result, k in zip(logits, results, num_logprobs, strict=True):
        (token_id,) = result.token_ids
        if k is None:
            assert result.logprobs == ()
        else:
            (entry,) = result.logprobs
            check_logprobs(entry, raw, token_id, min(k, VOCAB_SIZE))


def test_prompt_logprobs_are_those_of_the_targets() -> None:
    logits = make_logits(6, seed=3)
    targets = [0, 49, 7, 7, 20, 3]

    entries = Sampler(CPUKernels()).prompt_logprobs(logits, targets, 2).result()

    for raw, entry, token_id in zip(logits, entries, targets, strict=True):
        check_logprobs(entry, raw, token_id, 2)


def test_sampling_works_in_inference_mode() -> None:
    sampler = make_sampler(num_logprobs=1, logit_bias=((5, 100.0),))

    with torch.inference_mode():
        (result,) = sampler.sample(make_logits() * 1.0, ["a"])

    assert result.token_ids == (5,)
    assert result.logprobs[0].token_id == 5
