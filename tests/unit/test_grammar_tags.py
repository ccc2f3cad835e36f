"""Structural tags: free text, and what certain beginnings oblige to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.grammar import GrammarKind, GrammarSpec
from tests.grammar_builders import (
    EOS_ID,
    MarkerTokenizer,
    accepts,
    allowed,
    make_compiler,
    refusal,
)

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": OBJECT, "end": "</f>"},
        {"begin": "<f=two>", "schema": json.dumps({"type": "boolean"}), "end": "</f>"},
        {"begin": "[three]", "schema": {"type": "null"}, "end": ""},
    ],
    "triggers": ["<f=", "[three"],
}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value, **fields}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


ANY_TEXT = {"type": "any_text"}
INTEGER = schema({"type": "integer"})
ONE, TWO = tag("<1>", INTEGER, "</1>"), tag("<2>", schema({"type": "null"}), ["</2>", "</two>"])


def is_text(definition: dict[str, Any], text: str) -> bool:
    return accepts(GrammarKind.STRUCTURAL_TAG, json.dumps(definition), text)


def of_format(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": value}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no tags, but <f and < and [thre",
        '<f=one>{"a":1}</f>',
        'one: <f=one>{"a": 12}</f>, two: <f=two>true</f>',
        "[three]null and so on\n",
    ],
)
def test_structures_are_enforced_behind_their_triggers(text: str) -> None:
    assert is_text(STRUCTURES, text)


@pytest.mark.parametrize(
    "text",
    ['<f=one>{"a":"x"}</f>', "text <f=two>1</f>", "<f=", "<f=one>{", "<f=four>", "a [three b"],
)
def test_what_a_trigger_does_not_allow_is_refused(text: str) -> None:
    assert not is_text(STRUCTURES, text)


TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [ONE, TWO]}


@pytest.mark.parametrize(
    ("value", "texts", "others"),
    [
        (const("a b"), ["a b"], ["a", "a bc"]),
        (INTEGER, ["17"], ["x", ""]),
        (schema({"type": "array"}, max_whitespace_cnt=0), ["[1,2]"], ["[1, 2]"]),
        (schema({"type": "array"}, max_whitespace_cnt=2), ["[1,  2]"], ["[1,   2]"]),
        ({"type": "regex", "pattern": "a/[0-9]+"}, ["a/12"], ["a/"]),
        (ANY_TEXT, ["", "ü\n<1>"], []),
        ({"type": "or", "elements": [const("a"), INTEGER]}, ["a", "3"], ["b", "a3"]),
        ({"type": "sequence", "elements": [const("a"), INTEGER, ANY_TEXT]}, ["a3 x"], ["a", "3"]),
        (
            {"type": "sequence", "elements": [ANY_TEXT, const("</t>"), ONE]},
            ["x</t><1>3</1>", "</t><1>3</1>"],
            ["x<1>3</1>", "x</t>y"],
        ),
        ({"type": "sequence", "elements": [ANY_TEXT, ONE]}, ["x<1>3</1>"], ["x", "<1>x</1>"]),
        (TWO, ["<2>null</2>", "<2>null</two>"], ["<2>null", "x<2>null</2>"]),
        (tag("<t>", ANY_TEXT, "</t>"), ["<t>a</b></t>"], ["<t>a", "<t></t>a</t>"]),
        (
            tag("(", {"type": "sequence", "elements": [const("x"), ANY_TEXT]}, ")"),
            ["(x)", "(xyz)"],
            ["(y)", "(x) "],
        ),
        (TRIGGERED, ["", "a<1>2</1>b<2>null</2>"], ["a<b", "<1>x"]),
        (TRIGGERED | {"at_least_one": True}, ["<1>2</1>", "<1>2</1> a<1>3</1>"], ["", "a"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "a", "a<1>2</1>"], ["<1>2</1>a"]),
        (
            TRIGGERED | {"at_least_one": True, "stop_after_first": True},
            ["<1>2</1>"],
            ["", "<1>2</1>a"],
        ),
        (
            {"type": "tags_with_separator", "tags": [ONE, TWO], "separator": ", "},
            ["", "<1>2</1>", "<1>2</1>, <2>null</2>"],
            [", ", "<1>2</1><1>2</1>", "<1>2</1>, "],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [ONE],
                "separator": "",
                "at_least_one": True,
            },
            ["<1>2</1>", "<1>2</1><1>2</1>"],
            [""],
        ),
        ({"type": "plus", "content": ONE}, ["<1>2</1><1>3</1>"], [""]),
        ({"type": "star", "content": ONE}, ["", "<1>2</1><1>3</1>"], ["x"]),
        ({"type": "optional", "content": ONE}, ["", "<1>2</1>"], ["<1>2</1><1>3</1>"]),
    ],
)
def test_formats(value: dict[str, Any], texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not is_text(of_format(value), text)] == []
    assert [text for text in others if is_text(of_format(value), text)] == []


def test_special_tokens_in_tags_are_tokens() -> None:
    """Their text in other tokens would not be what the model was trained on."""
    tokenizer = MarkerTokenizer()
    value = of_format(
        {
            "type": "triggered_tags",
            "triggers": ["<tool>"],
            "tags": [tag("<tool>f ", INTEGER, "</tool>")],
        }
    )
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(value))
    state = make_compiler(tokenizer).compile(spec).start()
    begin, end = tokenizer.id_of("<tool>"), tokenizer.id_of("</tool>")

    assert {begin, EOS_ID, ord("<")} <= allowed(state.mask())
    for token_id in (ord("a"), begin, *b"f 1"):
        state.accept(token_id)

    assert allowed(state.mask()) == {end, *b"0123456789"}
    state.accept(end)
    assert EOS_ID in allowed(state.mask())


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ([], "must be an object"),
        ({}, "must have format"),
        ({"structures": [], "triggers": ["a"]}, "structures"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "begin, schema and end"),
        (STRUCTURES | {"triggers": []}, "triggers"),
        (STRUCTURES | {"triggers": ["<f="]}, "no trigger begins '[three]'"),
        (of_format({"type": "token_dispatch"}), "'token_dispatch'"),
        (of_format({"type": ["x"]}), "served are const_string"),
        (of_format({"type": "const_string"}), "value"),
        (of_format(tag("a", ANY_TEXT, None)), "end of a tag"),
        (of_format(tag("a", ANY_TEXT | {"excludes": ["x"]}, "b")), "excludes of any_text"),
        (of_format(schema({}, style="qwen_xml")), "style of json_schema"),
        (of_format(schema({"uniqueItems": True})), "uniqueItems"),
        (of_format({"type": "sequence", "elements": [ANY_TEXT, INTEGER]}), "any_text must be last"),
        (of_format(ONE | {"content": ONE | {"content": 5}}), "content"),
    ],
)
def test_what_is_not_served_is_refused_by_name(definition: Any, message: str) -> None:
    assert message in refusal(GrammarKind.STRUCTURAL_TAG, json.dumps(definition))


def test_endless_nesting_is_refused() -> None:
    value = ONE
    for _ in range(100):
        value = {"type": "plus", "content": value}

    assert "nested more than" in refusal(GrammarKind.STRUCTURAL_TAG, json.dumps(of_format(value)))
