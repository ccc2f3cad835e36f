"""What single formats do beside finding calls, the choice of a parser, and plugins."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from llmserve.tool_parsers import PARSERS, Tool, detect_parser, load_plugin
from llmserve.tool_parsers.python_values import python_to_json
from llmserve.tool_parsers.schema_types import types_of, value_to_json
from tests.tool_parser_texts import parse


def calls_of(name: str, text: str) -> list[tuple[str, object]]:
    content, calls, _ = parse(name, [text])
    assert content == ""
    return [(call, json.loads(arguments)) for call, arguments in calls]


def test_json_arguments_come_as_the_model_wrote_them() -> None:
    text = '<tool_call>{"arguments": {"a":1.0,\n "b" : "\\u00e9"}, "name": "f"}</tool_call>'

    assert parse("hermes", [text])[1] == [("f", '{"a":1.0,\n "b" : "\\u00e9"}')]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (', "arguments": null', {}), (', "arguments": "{\\"a\\": 1}"', {"a": 1})],
)
def test_odd_arguments_of_json_calls_are_read(arguments: str, expected: object) -> None:
    text = f'<tool_call>{{"name": "f"{arguments}}}</tool_call>'

    assert calls_of("hermes", text) == [("f", expected)]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": {}, "arguments": {}}',
        '{"name": "f", "name": "g"}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {}}}',
        '{"name": "f", "arguments": {"a": "\n"}}',
        "{}",
        "[]",
    ],
)
def test_malformed_json_call_is_content(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"

    assert parse("hermes", [text])[:2] == (text, [])


def test_call_behind_a_malformed_one_is_found() -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'

    content, calls, _ = parse("hermes", [f"<tool_call>{{bad}}</tool_call>{good}"])

    assert content == "<tool_call>{bad}</tool_call>"
    assert calls == [("f", "{}")]


@pytest.mark.parametrize("end", ["", "\n", "</tool", '\n<tool_call>{"name": "f"}'])
def test_hermes_closing_tag_may_be_missing(end: str) -> None:
    calls = calls_of("hermes", '<tool_call>{"name": "f"}' + end)

    assert calls == [("f", {})] * (2 if "name" in end else 1)


def test_llama_object_without_parameters_is_content() -> None:
    text = 'He is {"name": "Bob"}, and {"name": "Bob", "parameters": {}, "age": 3}.'

    assert parse("llama3_json", [text])[:2] == (text, [])


def test_llama_calls_are_found_in_text() -> None:
    call = '{"type": "function", "name": "f", "parameters": {"a": 1}}'

    content, calls, _ = parse("llama3_json", [f"So: {call};{call} {{x}}"])

    assert content == "So:  {x}"
    assert calls == [("f", '{"a": 1}')] * 2


def test_mistral_keeps_the_models_own_id() -> None:
    parser = PARSERS["mistral"]([])

    calls = parser.feed("[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}").calls + parser.flush().calls

    assert [(call.id, call.name) for call in calls] == [("abc123XYZ", "f")]


def test_mistral_call_without_the_args_token_is_read() -> None:
    assert calls_of("mistral", '[TOOL_CALLS]f{"a": 1}') == [("f", {"a": 1})]


def test_list_with_one_malformed_call_is_content_as_a_whole() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 5}]'

    assert parse("mistral", [text])[:2] == (text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f()", {}),
        ("f(a=1,)", {"a": 1}),
        ("f( a = 'x' , b = [True, None, (1, -2.5)] )", {"a": "x", "b": [True, None, [1, -2.5]]}),
        ("f(a=\"it's\", b='\"')", {"a": "it's", "b": '"'}),
        (
            "f(a={'k': {'l': 'm)]'}}, b=true, c=null)",
            {"a": {"k": {"l": "m)]"}}, "b": True, "c": None},
        ),
        ('f(a="""x\n"y" z""", b="")', {"a": 'x\n"y" z', "b": ""}),
        (r"f(a='\\', b='\'')", {"a": "\\", "b": "'"}),
        (r'f(a="\ud83d\ude00\/")', {"a": "😀/"}),
    ],
)
def test_python_arguments_are_read(text: str, expected: object) -> None:
    assert calls_of("pythonic", f"[{text}]") == [("f", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "[f(1)]",
        "[f(a=b)]",
        "[f(a=g())]",
        "[f(a=1 b=2)]",
        "[f(a=(1e999, 1))]",
        "[f(a={1: 2})]",
        "[f(a=b'x')]",
        "[f(a='x)]",
        "[f(a=1) g(b=2)]",
        "[f]",
        "[1f()]",
        "[f(a=1)",
        "[f(a=[1)]",
    ],
)
def test_malformed_python_call_is_content(text: str) -> None:
    assert parse("pythonic", [text])[:2] == (text, [])


def test_llama4_list_may_lack_its_markers() -> None:
    assert calls_of("llama4_pythonic", "[f(a=1)]<|python_end|>") == [("f", {"a": 1})]
    assert calls_of("llama4_pythonic", "<|python_start|>[f(a=1)]") == [("f", {"a": 1})]


def test_qwen_wrapper_may_be_missing() -> None:
    function = "<function=list_cities>\n</function>"

    for text in (
        function,
        f"{function}\n</tool_call>",
        f"<tool_call>{function}",
        f"{function}</to",
    ):
        assert calls_of("qwen3_coder", text) == [("list_cities", {})]


def test_qwen_value_keeps_all_but_its_framing_newlines() -> None:
    text = "<function=get_weather><parameter=city>\n\n a\n\n</parameter></function>"

    assert calls_of("qwen3_coder", text) == [("get_weather", {"city": "\n a\n"})]


def test_json_value_may_contain_the_closing_tag() -> None:
    text = '<function=get_weather><parameter=options>{"a": "</parameter>"}</parameter></function>'

    assert calls_of("qwen3_coder", text) == [("get_weather", {"options": {"a": "</parameter>"}})]


def test_glm_call_needs_no_newlines() -> None:
    text = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"

    assert calls_of("glm45", text) == [("get_weather", {"days": 3})]


def test_kimi_call_without_a_section_is_read() -> None:
    text = "<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|> {} <|tool_call_end|>"

    assert calls_of("kimi_k2", text) == [("a.b", {})]


def test_harmony_recipient_may_come_with_the_role() -> None:
    text = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"

    assert calls_of("openai", text) == [("f", {})]


def test_harmony_messages_to_nobody_are_content() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>x"
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"

    content, calls, _ = parse("openai", [f"{text}<|end|>{call}"])

    assert content == f"{text}<|end|>"
    assert calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"string"}, "5"),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("5", {"string", "integer"}, 5),
        ('"5"', {"string", "integer"}, '"5"'),
        ("5.5", {"string", "integer"}, "5.5"),
        (" 5 ", {"integer"}, 5),
        ("True", {"boolean"}, True),
        ("{'a': None}", {"object"}, {"a": None}),
        ("five", {"integer"}, "five"),
        ('{"a": 1}', set(), {"a": 1}),
        ("five", set(), "five"),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, float("inf")),
    ],
)
def test_values_follow_their_types(text: str, types: set[str], expected: object) -> None:
    assert json.loads(value_to_json(text, frozenset(types))) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "int"}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a~1b"}]}, {"string", "object"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        (
            {"enum": ["a", 1, 2.5, None, True, [], {}]},
            {"string", "integer", "number", "null", "boolean", "array", "object"},
        ),
        ({"const": "a"}, {"string"}),
        (
            {"allOf": [{"type": ["string", "null"]}, {"type": "string"}, {"minLength": 1}]},
            {"string"},
        ),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "http://elsewhere"}, set()),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_are_read_from_schemas(schema: object, expected: set[str]) -> None:
    root = {"$defs": {"a/b": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}

    assert types_of(schema, root) == expected


def test_python_value_too_deep_is_no_value() -> None:
    assert python_to_json("(" * 5000 + "1" + ")" * 5000) is None


TEMPLATES = {
    "hermes": "return a JSON object within <tool_call></tool_call> XML tags:",
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "glm45": "<tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "deepseek_v3": "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name}}",
    "kimi_k2": "<|tool_calls_section_begin|>{% for tool_call in message['tool_calls'] %}",
    "openai": "{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary' }}",
    "granite": "respond only with <|tool_call|> followed by a JSON list of tools used.",
    "phi4_mini_json": 'a single JSON list: functools[{"name": [function name], "arguments": []}]',
    "llama3_json": '{{- \'Respond as {"name": function name, "parameters": dictionary}. \' }}',
    "llama4_json": '\'<|header_start|>\' {"name": function name, "parameters": dictionary}',
    "pythonic": "Answer with [func_name1(params_name1=params_value1), func_name2(params)]",
    "llama4_pythonic": "<|header_start|>system ... [func_name1(param1=value1), func_name2()]",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_parser_is_chosen_by_the_template(name: str) -> None:
    assert detect_parser("{% for message in messages %}" + TEMPLATES[name]) == name


def test_template_with_the_python_tag_is_llamas() -> None:
    assert detect_parser('{{- "<|python_tag|>" + tool_call.name + ".call(" }}') == "llama3_json"


def test_template_without_tools_has_no_parser() -> None:
    assert detect_parser("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}") is None


DOCUMENT = (Path(__file__).parents[2] / "docs" / "tool-parsers.md").read_text(encoding="utf-8")


def test_documented_plugin_adds_a_parser(tmp_path: Path) -> None:
    example = re.search(r"\n((?:    .*\n|\n)+)", DOCUMENT.partition("## Adding one")[2][2:])
    assert example
    path = tmp_path / "my-plugin.py"
    path.write_text(textwrap.dedent(example[1]))
    try:
        load_plugin(path)

        text = 'Well. CALL f {"a": "END"} END'
        assert parse("shout", [text])[:2] == ("Well. ", [("f", '{"a": "END"}')])
        assert parse("shout", [text[:-1]])[:2] == (text[:-1], [])
    finally:
        PARSERS.pop("shout", None)


def test_every_parser_is_documented() -> None:
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| `", DOCUMENT, re.MULTILINE)

    assert {name for row in rows for name in row.split(", ")} == set(PARSERS)


def test_plugin_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.py is not a Python file"):
        load_plugin(tmp_path / "missing.py")


def test_plugin_that_fails_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")

    with pytest.raises(ZeroDivisionError):
        load_plugin(path)


def test_tools_without_a_schema_may_have_any_arguments() -> None:
    for parser in set(PARSERS.values()):
        grammar = parser.lark(
            [Tool("f", {})], is_required=True, is_parallel=True, special_tokens={}
        )
        assert grammar.startswith("start: ")
