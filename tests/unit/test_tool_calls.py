"""Tool calls in text: the same calls and content wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.api.tool_calls import HermesParser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich <b>"}}\n</tool_call>'
TEXTS = [
    "no call at all",
    "a < b and <tool and <tool_call",
    CALL,
    f"I will look. {CALL}",
    f"{CALL}\n{CALL}\n",
    f"x{CALL} and then y",
    "<tool_call>not json</tool_call>",
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}',
    '<tool_call>{"name": "f", "argu',
    '<tool_call>{"name": "f"}</tool_call>',
]


def parse(pieces: list[str]) -> tuple[str, list[tuple[int, str, dict[str, object]]]]:
    parser = HermesParser()
    parts = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    calls = [call for part in parts for call in part.calls]
    content = "".join(part.content for part in parts)
    return content, [(c.index, c.name, json.loads(c.arguments)) for c in calls]


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_gives_the_same_answer(text: str) -> None:
    whole = parse([text])

    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]]) == whole
    assert parse(list(text)) == whole


@given(st.lists(st.sampled_from([*"<tool_cal>/{} ", "<tool_call>", "</tool_call>", CALL])))
def test_text_without_calls_is_never_lost(pieces: list[str]) -> None:
    content, calls = parse(pieces)

    if not calls:
        assert content == "".join(pieces)


def test_calls_are_numbered_and_content_before_them_is_kept() -> None:
    content, calls = parse([f"I will look. {CALL}\n{CALL}"])

    assert content == "I will look. "
    assert calls == [
        (0, "get_weather", {"city": "Zürich <b>"}),
        (1, "get_weather", {"city": "Zürich <b>"}),
    ]


def test_malformed_call_comes_back_as_content() -> None:
    assert parse(["<tool_call>{broken</tool_call>"]) == ("<tool_call>{broken</tool_call>", [])


def test_last_call_may_lack_its_closing_tag() -> None:
    assert parse(['<tool_call>{"name": "f", "arguments": {"a": 1}}']) == ("", [(0, "f", {"a": 1})])
