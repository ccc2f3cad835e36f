"""Every tool-call format: calls and content of known texts, wherever they are cut."""

from __future__ import annotations

import json

import pytest

from llmserve.tool_parsers import PARSERS
from tests.tool_parser_texts import CALLS, FORMATS, NAMES, TOOLS, Call, parse, parser_name

PAIRS = [(name, calls) for name in NAMES for calls in CALLS]


def assert_calls(found: list[tuple[str, str]], expected: list[Call]) -> None:
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected


def assert_same_wherever_cut(name: str, text: str) -> None:
    content, calls, _ = parse(name, [text])

    for cut in range(len(text) + 1):
        assert parse(name, [text[:cut], text[cut:]])[:2] == (content, calls)
    assert parse(name, list(text))[:2] == (content, calls)


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_calls_are_found(name: str, case: str) -> None:
    content, calls, _ = parse(name, [FORMATS[name].write(CALLS[case])])

    assert_calls(calls, CALLS[case])
    assert content == ""


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_result_does_not_depend_on_cuts(name: str, case: str) -> None:
    assert_same_wherever_cut(name, FORMATS[name].write(CALLS[case]))


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_constrained_calls_come_in_pieces_that_join_to_the_same(name: str, case: str) -> None:
    text = FORMATS[name].write(CALLS[case])
    _, calls, _ = parse(name, [text])

    content, streamed, num_deltas = parse(name, list(text), is_constrained=True)

    assert streamed == calls
    assert content == ""
    if any(arguments for _, arguments in CALLS[case]):
        assert num_deltas > len(calls)


@pytest.mark.parametrize("name", NAMES)
def test_constrained_name_comes_before_the_arguments_do(name: str) -> None:
    text = FORMATS[name].write(CALLS["one"])
    parser = PARSERS[parser_name(name)](TOOLS, is_constrained=True)
    deltas = [delta for char in text for delta in parser.feed(char).calls]

    assert (deltas[0].name, deltas[0].arguments) == ("get_weather", "")


@pytest.mark.parametrize("name", NAMES)
def test_text_around_calls_is_content(name: str) -> None:
    call = FORMATS[name].write(CALLS["one"])
    before = "" if FORMATS[name].bare else "I will look that up.\n"
    text = f"{before}{call} and then {call} \n"
    if FORMATS[name].bare:
        text = f" \n{call} and then"

    content, calls, _ = parse(name, [text])

    assert content == (" and then" if FORMATS[name].bare else f"{before} and then ")
    assert_calls(calls, CALLS["one"] * (1 if FORMATS[name].bare else 2))
    assert_same_wherever_cut(name, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["", "\n\n"])
def test_white_space_around_calls_is_dropped(name: str, before: str) -> None:
    call = FORMATS[name].write(CALLS["one"])
    text = f"{before}{call}\n \n{call}\n"

    content, calls, _ = parse(name, [text])

    assert content == ""
    assert_calls(calls, CALLS["one"] * 2)
    assert_same_wherever_cut(name, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "no call at all",
        "a < b, <tool, [1, 2], {1: 2}, func(x=1) and <|",
        "[not a list of calls]",
        '{"name": "Bob", "age": 5}',
        '{"name": "Bob"}',
        '[{"name": "Bob", "age": 5}]',
        "[x(1)]",
        "[]{}",
        '```json\n{"a": [1, 2]}\n```',
        "<tool_call><tool_call>",
        "[TOOL_CALLS]",
        "functools[",
        "<|channel|>final<|message|>Hello<|return|>",
        "<|python_tag|>print(1)",
        "<tool_call>\n</tool_call>",
        "<tool_call>two words</tool_call>",
        "<function=f>\n<parameter=a>\n1",
    ],
)
def test_text_without_calls_comes_back_as_it_is(name: str, text: str) -> None:
    assert parse(name, [text])[:2] == (text, [])
    assert_same_wherever_cut(name, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["one", "parallel"])
def test_truncated_text_is_never_lost(name: str, case: str) -> None:
    """What was not given out as a complete call is content, and calls are never cut off."""
    text = FORMATS[name].write(CALLS[case])
    for size in range(1, len(text)):
        content, calls, _ = parse(name, [text[:size]])

        assert_calls(calls, CALLS[case][: len(calls)])
        if not calls:
            assert content == text[:size]
        else:
            assert text[:size].endswith(content)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_text_does_not_depend_on_cuts(name: str) -> None:
    text = FORMATS[name].write(CALLS["parallel"])
    for size in range(0, len(text), 13):
        assert_same_wherever_cut(name, text[:size])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", range(0, 60, 6))
def test_text_with_a_part_missing_is_not_lost(name: str, size: int) -> None:
    """Whatever is not a call is content, in order."""
    text = FORMATS[name].write(CALLS["nested"])
    text = text[: size + 5] + text[size + 10 :]

    content, calls, _ = parse(name, [text + " the end"])

    assert content.endswith(" the end")
    if not calls:
        assert content == text + " the end"
    assert_same_wherever_cut(name, text + " the end")


@pytest.mark.parametrize("name", NAMES)
def test_truncated_constrained_call_keeps_its_beginning(name: str) -> None:
    text = FORMATS[name].write([("get_weather", {"city": "Paris and Rome", "days": 3})])
    cut = text.index("and")

    content, calls, _ = parse(name, [text[:cut]], is_constrained=True)

    assert content == ""
    assert [call for call, _ in calls] == ["get_weather"]


@pytest.mark.parametrize("name", NAMES)
def test_calls_have_distinct_ids_of_the_format(name: str) -> None:
    parser = PARSERS[parser_name(name)](TOOLS)
    calls = parser.feed(FORMATS[name].write(CALLS["parallel"])).calls + parser.flush().calls
    ids = [call.id or "" for call in calls]

    assert len(set(ids)) == 3
    if name.startswith("mistral"):
        assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)
    elif name == "kimi_k2":
        assert ids[:2] == ["functions.get_weather:0", "functions.list_cities:1"]
    else:
        assert all(i.startswith("call_") and len(i) == 29 for i in ids)
        assert all(int(i[5:], 16) >= 0 for i in ids)


def test_aliases_are_the_parsers_that_they_name() -> None:
    assert PARSERS["qwen3_json"] is PARSERS["hermes"]
    assert PARSERS["llama4_json"] is PARSERS["llama3_json"]
    assert PARSERS["qwen3_xml"] is PARSERS["qwen3_coder"]
    assert {parser_name(name) for name in NAMES} | {
        "qwen3_json",
        "llama4_json",
        "qwen3_xml",
        "deepseek_v31",
        "glm47",
    } == set(PARSERS)
