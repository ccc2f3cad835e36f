"""Tool parsers on random texts: nothing depends on the cuts, nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.tool_parsers.json_scanner import JsonScanner, is_json
from llmserve.tool_parsers.python_values import python_to_json
from tests.tool_parser_texts import CALLS, FORMATS, NAMES, Call, parse, parser_name

SCRAPS = [
    *("<", "|", ">", "[", "]", "{", "}", "(", ")", '"', "'", "\\", ",", ":", ";", "=", " ", "\n"),
    *("name", "arguments", "parameters", "1", "true", "None", "f", "é", "to=functions.f", "```"),
    *("</tool_call>", "<tool_call>", "<function=f>", "</function>", "<parameter=a>", "[ARGS]"),
    *("</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]"),
    *("<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>", "functools[", "f(a=1)"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>"),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}'),
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def scraps(name: str) -> st.SearchStrategy[list[str]]:
    calls = [FORMATS[name].write(calls) for calls in CALLS.values()]
    return st.lists(st.sampled_from([*SCRAPS, *FORMATS[name].tokens, *calls]), max_size=25)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_text_gives_the_same_wherever_it_is_cut(name: str, data: st.DataObject) -> None:
    pieces = data.draw(scraps(name))
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = parse(name, [text])[:2]

    assert parse(name, pieces)[:2] == whole
    assert parse(name, cut)[:2] == whole
    assert parse(name, list(text))[:2] == whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_content_is_the_text_without_its_calls(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(scraps(name)))

    content, calls, _ = parse(name, [text])

    if calls:
        assert is_subsequence(content, text)
    else:
        assert content == text
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_arguments_come_back(name: str, data: st.DataObject) -> None:
    calls = data.draw(st.lists(a_call(name), min_size=1, max_size=3))
    text = FORMATS[name].write(calls)

    for is_constrained in (False, True):
        content, found, _ = parse(name, list(text), is_constrained=is_constrained)

        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def a_call(name: str) -> st.SearchStrategy[Call]:
    """Arguments of the declared types."""
    text = TEXTS.filter(lambda value: not any(end in value for end in FORMATS[name].forbidden))
    values = {
        "city": text,
        "days": st.integers(),
        "flags": st.lists(st.booleans(), max_size=3),
        "options": st.dictionaries(TEXTS, JSON_VALUES, max_size=3),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "is_exact": st.booleans(),
        "unit": st.none() | text.filter(lambda value: value.strip() != "null"),
    }
    arguments = st.fixed_dictionaries({}, optional=values)
    return st.tuples(st.just("get_weather"), arguments)


def is_subsequence(part: str, text: str) -> bool:
    rest = iter(text)
    return all(char in rest for char in part)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*SCRAPS, "0", "-", "1.5", "e3", '"a"', "\\u00e9", "[1]"])))
def test_json_scanner_takes_what_json_is(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        json.loads(text, parse_constant=refuse_constant)
        expected = True
    except ValueError:
        expected = False

    assert is_json(text) == expected


@settings(deadline=None)
@given(JSON_VALUES, st.sampled_from([None, 1]), TEXTS)
def test_json_scanner_stops_where_the_value_ends(value: object, indent: int, rest: str) -> None:
    text = json.dumps([value], indent=indent)
    scanner = JsonScanner()
    pos = 0
    for size in range(1, len(text + rest) + 1):
        pos = scanner.advance((text + rest)[:size], pos)
        if scanner.is_done:
            break

    assert scanner.is_done
    assert pos == len(text)


@settings(deadline=None)
@given(
    st.recursive(
        JSON_VALUES | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    )
)
def test_python_literals_become_their_json(value: object) -> None:
    assert json.loads(python_to_json(repr(value)) or "") == value
    assert json.loads(python_to_json(json.dumps(value)) or "") == value


def test_every_parser_is_tested() -> None:
    assert len({parser_name(name) for name in NAMES}) == 13


def refuse_constant(name: str) -> None:
    raise ValueError(name)
