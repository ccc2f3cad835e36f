"""Special tokens in text: leftmost, then longest."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmserve.errors import StartupError
from llmserve.tokenizer import token_matcher
from llmserve.tokenizer.token_matcher import TokenMatcher

LETTERS = st.text("ab<]^-\\", max_size=12)


def split_slowly(text: str, ids: dict[str, int]) -> list[str | int]:
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        found = [token for token in ids if token and text.startswith(token, position)]
        if found:
            token = max(found, key=len)
            parts.append(ids[token])
            position += len(token)
            continue
        if parts and isinstance(parts[-1], str):
            parts[-1] += text[position]
        else:
            parts.append(text[position])
        position += 1
    return parts


@pytest.mark.parametrize("window", [1, 3, 1 << 16])
@example(tokens=["a", "abb"], text="--abb")
@given(tokens=st.lists(LETTERS, max_size=8, unique=True), text=LETTERS)
def test_parts_are_those_of_a_slow_search_whatever_the_window(
    window: int, tokens: list[str], text: str
) -> None:
    ids = {token: i for i, token in enumerate(tokens)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_matcher, "_WINDOW", window)

        assert list(TokenMatcher(ids).split(text)) == split_slowly(text, ids)


def test_thousands_of_tokens_cost_little() -> None:
    matcher = TokenMatcher({f"<unused{i}>": i for i in range(6000)})
    text = "a < b and <unused7 is no token, <unused77> is one; " * 20_000

    begin = time.perf_counter()
    parts = list(matcher.split(text))

    assert parts[1] == 77
    assert time.perf_counter() - begin < 2.0  # 0.02 s on an idle machine


@pytest.mark.parametrize(
    "tokens", [["a" * 513], ["a" * n for n in range(1, 512)], ["a" * 512 + "b"]]
)
def test_absurd_tokens_stop_the_start_or_work(tokens: list[str]) -> None:
    try:
        matcher = TokenMatcher({token: i for i, token in enumerate(tokens)})
    except StartupError:
        return
    assert list(matcher.split("a" * 511)) == [510]
