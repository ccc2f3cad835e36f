"""Limits of a request that are checked when its prompts are known."""

from __future__ import annotations

import pytest

from llmserve.api.preparation import check_num_logprobs
from llmserve.core import SamplingParams
from llmserve.errors import RequestError


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(num_logprobs=262_144), "logprobs"),
        (SamplingParams(num_prompt_logprobs=262_144), "prompt_logprobs"),
    ],
)
def test_whole_vocabularies_of_many_tokens_are_refused(
    sampling: SamplingParams, field: str
) -> None:
    check_num_logprobs(sampling, 4, 4)

    with pytest.raises(RequestError) as caught:
        check_num_logprobs(sampling, 5, 5)

    assert caught.value.param == field
    assert "1048576" in caught.value.message


def test_some_logprobs_of_any_number_of_tokens_are_not_refused() -> None:
    check_num_logprobs(SamplingParams(num_logprobs=20), 1, 1 << 20)
