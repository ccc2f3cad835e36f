"""The thinking budget: when the end of thinking is forced, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmserve.core import SamplingParams, ThinkingBudget
from llmserve.kernels import CPUKernels
from llmserve.runner.sampler import Sampler
from llmserve.runner.thinking import ThinkingFollower

VOCAB = 256


def make_budget(
    max_tokens: int, *, is_open: bool = True, end_token_ids: tuple[int, ...] = tuple(b"</t>")
) -> ThinkingBudget:
    """Tokens are bytes."""
    return ThinkingBudget(
        max_tokens=max_tokens,
        is_open=is_open,
        start=b"<t>",
        ends=(b"</t>", b"<call>"),
        end_token_ids=end_token_ids,
        token_bytes=lambda token_id: bytes([token_id]),
    )


def generate(budget: ThinkingBudget, wanted: bytes, num_tokens: int) -> bytes:
    """The output of a model that would write `wanted`, over and over."""
    follower = ThinkingFollower(budget, ())
    output, place = b"", 0
    while len(output) < num_tokens:
        forced = follower.forced_token_id
        if forced is None:
            forced, place = wanted[place % len(wanted)], place + 1
        follower.append(forced)
        output += bytes([forced])
    return output


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_end_is_forced_after_the_budget(max_tokens: int) -> None:
    output = generate(make_budget(max_tokens), b"x", max_tokens + 6)

    assert output == b"x" * max_tokens + b"</t>xx"


def test_thinking_that_the_model_begins_is_counted_from_its_start() -> None:
    budget = make_budget(2, is_open=False)

    assert generate(budget, b"\n<t>abcd", 14) == b"\n<t>ab</t>cd\n<"


def test_output_that_does_not_think_is_left_alone() -> None:
    budget = make_budget(1, is_open=False)

    assert generate(budget, b"a<t>bcdefgh", 11) == b"a<t>bcdefgh"


@pytest.mark.parametrize("end", [b"</t>", b"<call>"])
def test_thinking_that_ends_by_itself_is_not_ended_again(end: bytes) -> None:
    wanted = b"a" + end + b"bcdefghijklmnop"

    assert generate(make_budget(len(end) + 3), wanted, len(wanted)) == wanted


def test_resumed_sequence_goes_on_where_it_was() -> None:
    budget = make_budget(3)
    whole = generate(budget, b"x", 12)

    for size in range(len(whole)):
        resumed, unbroken = ThinkingFollower(budget, whole[:size]), ThinkingFollower(budget, ())
        for token_id in whole[:size]:
            unbroken.append(token_id)
        assert resumed.forced_token_id == unbroken.forced_token_id
        forced = resumed.forced_token_id
        assert forced is None or forced == whole[size]


def test_sampler_forces_the_end_whatever_else_masks_it() -> None:
    sampler = Sampler(CPUKernels())
    sampling = SamplingParams(
        temperature=0.0,
        allowed_token_ids=(7,),
        logit_bias=((ord("<"), -100.0),),
        thinking_budget=make_budget(2),
        num_logprobs=0,
    )
    sampler.add("r", sampling, [1], [])
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 3.0

    results = [sampler.sample(logits.clone(), ["r"])[0] for _ in range(7)]

    assert [r.token_ids[0] for r in results] == [7, 7, *b"</t>", 7]
    raw = float(torch.log_softmax(logits[0].double(), 0)[ord("<")])
    assert np.isclose(results[2].logprobs[0].logprob, raw, atol=1e-5)
