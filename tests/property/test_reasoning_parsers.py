"""Reasoning parsers: the same reasoning and content wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.reasoning_parsers import PARSERS, ReasoningParser

THINK = "<think>"
CORPUS = {
    "deepseek_r1": ["a</think>b", "<think>a</think>b", "never closed", "</think>", "x</thi"],
    "qwen3": [
        "<think>\na\n</think>\n\nb",
        "  <think>a</think>",
        "plain < b",
        "<think>a <tool_call>{}</tool_call>",
        "<think>a</think>b</think>c",
        "<thin",
    ],
    "glm45": ["\n<think>é🙂</think>b", "\n<think></think>b", "<think>a<tool_call>f</tool_call>"],
    "kimi_k2": ["<think>a</think>b", "<think>a<|tool_calls_section_begin|><|tool_call_begin|>x"],
    "mistral": ["[THINK]a[/THINK]b", "[THINK]a[b[/c", "[TOOL_CALLS]f", "a[THINK]"],
    "granite": [
        "Here is my thought process:\na\nHere's my response:\nb",
        "Here's my thought process: Here is my resp, no",
        "Here is an answer",
    ],
    "openai_gptoss": [
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "<|channel|>final<|message|>b<|return|>",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to="
        'functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>a <| b<|end|>",
        '{"plain": "json"}',
        "assistant who is plain",
        "<|channel|>analysis",
    ],
}
PROMPTS = ["", "<think>", "<think>\n\n</think>\n\n", "<|channel|>analysis<|message|>"]
CASES = [(name, text, prompt) for name, ts in CORPUS.items() for text in ts for prompt in PROMPTS]


def parse(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str, list[tuple[int, int]]]:
    parts = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    reasoning = "".join(part.reasoning for part in parts)
    return reasoning, "".join(part.content for part in parts), parser.segments


def make(name: str, prompt: str = "", hides_markers: bool = False) -> ReasoningParser:
    return PARSERS[name](prompt, hides_markers=hides_markers)


def test_every_parser_has_texts() -> None:
    assert CORPUS.keys() == PARSERS.keys()


@pytest.mark.parametrize("hides_markers", [False, True])
@pytest.mark.parametrize(("name", "text", "prompt"), CASES)
def test_every_cut_gives_the_same_answer(
    name: str, text: str, prompt: str, hides_markers: bool
) -> None:
    whole = parse(make(name, prompt, hides_markers), [text])

    for cut in range(len(text) + 1):
        cut_parser = make(name, prompt, hides_markers)
        assert parse(cut_parser, [text[:cut], text[cut:]]) == whole
    assert parse(make(name, prompt, hides_markers), list(text)) == whole


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_random_texts_in_random_pieces_give_the_same_answer(name: str, data: st.DataObject) -> None:
    words = [*PARSERS[name].markers, "a", "\n", "<", "[", "Here", "final", "analysis", " to=", "é"]
    pieces = data.draw(st.lists(st.sampled_from(words)))
    prompt = data.draw(st.sampled_from(PROMPTS))
    text = "".join(pieces)

    whole = parse(make(name, prompt), [text])

    assert parse(make(name, prompt), pieces) == whole
    assert parse(make(name, prompt), list(text)) == whole


@pytest.mark.parametrize(("name", "text", "prompt"), CASES)
def test_segments_are_where_the_reasoning_is(name: str, text: str, prompt: str) -> None:
    parser = make(name, prompt)

    reasoning, _, segments = parse(parser, list(text))

    assert "".join(text[begin:end] for begin, end in segments) == reasoning
    assert parser.decided == len(text)
