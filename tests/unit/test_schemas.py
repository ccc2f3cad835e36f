"""Request models and prompt rules that need no server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.api.body import parse_object
from llmserve.api.defaults import SamplingDefaults, eos_token_ids
from llmserve.api.fields import check_vocabulary, shorten, validate
from llmserve.api.prompts import resolve_max_tokens, split_prompts
from llmserve.api.schemas import ChatRequest, CompletionRequest, ignored_fields
from llmserve.errors import ContextLengthError, RequestError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def refusal_of(check: Callable[..., object], *args: object) -> RequestError | None:
    """The RequestError that `check` raises, if it does."""
    try:
        check(*args)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_any_value_in_any_field_is_taken_or_refused_by_name(model: Any) -> None:
    base = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}

    @given(st.sampled_from(sorted(model.model_fields)), JSON_VALUES)
    def check(name: str, value: Any) -> None:
        refusal = refusal_of(validate, model, {**base, name: value})

        assert refusal is None or (refusal.param or "").startswith(name)
        assert refusal is None or len(refusal.message) < 500

    check()


@given(JSON_VALUES)
def test_any_prompt_is_split_or_refused(value: Any) -> None:
    refusal = refusal_of(split_prompts, value)

    if refusal is None:
        assert all(isinstance(prompt, str | list) for prompt in split_prompts(value).values())
    else:
        assert (refusal.param or "").startswith("prompt")


@given(JSON_VALUES)
def test_shown_values_are_short(value: Any) -> None:
    assert len(shorten(value)) <= 400  # 60 characters, each escaped at worst


def test_null_is_absent() -> None:
    fields: dict[str, Any] = dict.fromkeys(CompletionRequest.model_fields)

    request = validate(CompletionRequest, {**fields, "prompt": "x"})

    assert request == CompletionRequest(prompt="x")


def test_ignored_fields_name_what_has_no_effect() -> None:
    body = {"prompt": "x", "user": "u", "foo": 1, "bar": None, "bad name\r\n": 1, "seed": 1}

    assert ignored_fields(CompletionRequest, body) == ["bad name\r\n", "foo", "user"]


def test_ignored_fields_name_unknown_stream_options() -> None:
    body = {"stream_options": {"include_usage": True, "include_obfuscation": False}}

    assert ignored_fields(CompletionRequest, body) == ["stream_options.include_obfuscation"]


@pytest.mark.parametrize(
    ("asked", "default", "num_prompt_tokens", "expected"),
    [
        (None, 16, 10, 16),
        (None, 16, 95, 5),
        (None, None, 10, 90),
        (90, 16, 10, 90),
        (1, None, 99, 1),
    ],
)
def test_output_budget_of_a_prompt(
    asked: int | None, default: int | None, num_prompt_tokens: int, expected: int
) -> None:
    assert resolve_max_tokens(asked, default, num_prompt_tokens, 100) == expected


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens"), [(91, 10), (None, 100), (1, 100), (5, 500)]
)
def test_what_does_not_fit_is_refused(asked: int | None, num_prompt_tokens: int) -> None:
    with pytest.raises(ContextLengthError) as refusal:
        resolve_max_tokens(asked, 16, num_prompt_tokens, 100)

    assert "100" in refusal.value.message
    assert str(num_prompt_tokens) in refusal.value.message
    assert "-" not in refusal.value.message


@given(st.lists(st.integers(-5, 15)))
def test_vocabulary_check_finds_every_bad_id(ids: list[int]) -> None:
    is_good = all(0 <= i < 10 for i in ids)

    if is_good:
        check_vocabulary(ids, 10, "prompt")
    else:
        position = next(position for position, i in enumerate(ids) if not 0 <= i < 10)
        with pytest.raises(RequestError, match="it must be a token id from 0 to 9") as refusal:
            check_vocabulary(ids, 10, "prompt")
        assert refusal.value.param == f"prompt[{position}]"


def test_generation_config_gives_defaults_and_end_ids(caplog: pytest.LogCaptureFixture) -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": "x", "min_p": None, "eos_token_id": [2, 7]}

    defaults = SamplingDefaults.from_generation_config(config)

    assert defaults == SamplingDefaults(temperature=0.6, top_k=20)
    assert "top_p" in caplog.text
    assert eos_token_ids((1, 2), config) == (1, 2, 7)
    assert eos_token_ids((1,), {"eos_token_id": 5}) == (1, 5)
    assert eos_token_ids((1,), {}) == (1,)


@pytest.mark.parametrize("body", [b"[1]", b"1e999", b'{"a": NaN}', b"\xff", b"[" * 10**5, b""])
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_object(body)


def test_last_of_two_equal_keys_counts() -> None:
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}


def test_importing_the_api_does_not_import_torch() -> None:
    code = (
        "import sys, llmserve.api.schemas, llmserve.api.fields; assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
