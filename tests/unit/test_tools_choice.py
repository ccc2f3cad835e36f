"""tool_choice: what each form means, and which forms are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.api.messages import check_tools
from llmserve.api.tool_choice import ToolMode, read_tool_choice
from llmserve.errors import RequestError
from llmserve.grammar import GrammarKind
from llmserve.tool_parsers import PARSERS
from tests.grammar_builders import accepts
from tests.tool_parser_texts import FORMATS, parser_name


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


# The other spellings are read, but no grammar asks for them.
SPELLED_BY_GRAMMARS = sorted(FORMATS.keys() - {"mistral named", "granite tag", "granite bare"})
TOOLS = [tool("a", parameters={"type": "object"}), tool("b", strict=True), tool("c")]


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ToolMode.AUTO, "abc"),
        ("none", ToolMode.NONE, ""),
        ("auto", ToolMode.AUTO, "abc"),
        ("required", ToolMode.REQUIRED, "abc"),
        ({"type": "function", "function": {"name": "b"}}, ToolMode.NAMED, "b"),
        ({"type": "function", "name": "b"}, ToolMode.NAMED, "b"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [tool("a"), tool("c")]},
            },
            *(ToolMode.REQUIRED, "ac"),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "c"}],
            },
            *(ToolMode.AUTO, "c"),
        ),
    ],
)
def test_choice_is_read(choice: Any, mode: ToolMode, names: str) -> None:
    read = read_tool_choice(choice, TOOLS)

    assert read.mode is mode
    assert "".join(tool.name for tool in read.tools) == names


def test_default_without_tools_is_none() -> None:
    assert read_tool_choice(None, []).mode is ToolMode.NONE


def test_forced_calls_follow_every_schema_and_others_that_of_strict_tools() -> None:
    forced = read_tool_choice("required", TOOLS)
    auto = read_tool_choice("auto", TOOLS)

    assert [tool.is_strict for tool in forced.tools] == [True, True, True]
    assert [tool.is_strict for tool in auto.tools] == [False, True, False]
    assert auto.has_strict_tool


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        (5, "tool_choice"),
        ({"type": "function", "function": {"name": "z"}}, "tool_choice.function.name"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "mode": "none", "tools": [tool("a")]}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [tool("z")]},
            "tool_choice.tools[0].function.name",
        ),
    ],
)
def test_malformed_choice_is_refused_by_name(choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        read_tool_choice(choice, TOOLS)

    assert error.value.param == param


@pytest.mark.parametrize("choice", ["auto", "required", {"function": {"name": "a"}}])
def test_choice_needs_tools(choice: Any) -> None:
    with pytest.raises(RequestError, match="the request has none"):
        read_tool_choice(choice, [])


@pytest.mark.parametrize("name", SPELLED_BY_GRAMMARS)
@pytest.mark.parametrize(
    ("parameters", "takes_any"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object"}}}, False),
        ({"type": "object", "additionalProperties": False}, False),
        ({"type": "object", "additionalProperties": True}, True),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, True),
    ],
)
def test_tool_without_declared_parameters_takes_none(
    name: str, parameters: Any, takes_any: bool
) -> None:
    choice = read_tool_choice("required", [tool("f", parameters=parameters)])
    source = PARSERS[parser_name(name)].lark(
        list(choice.tools), is_required=True, is_parallel=False, special_tokens={}
    )

    def takes(arguments: dict[str, Any]) -> bool:
        text = FORMATS[name].write([("f", arguments)])
        return any(
            accepts(GrammarKind.LARK, source, spelled)
            for spelled in (text, text.replace('": {"', '":{"'), text.replace(": ", ":"))
        )

    assert takes({})
    assert takes({"x": 1}) == takes_any


@pytest.mark.parametrize("parameters", [{"required": ["x"]}, {"anyOf": [{"required": ["x"]}]}])
def test_schema_that_names_members_in_other_ways_stays(parameters: dict[str, Any]) -> None:
    (read,) = read_tool_choice("required", [tool("f", parameters=parameters)]).tools

    assert read.parameters == parameters


@pytest.mark.parametrize(
    ("function", "key"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"name": 5}, "name"),
        ({"parameters": {"type": "array"}}, "parameters.type"),
        ({"parameters": {"type": ["string", "null"]}}, "parameters.type"),
        ({"parameters": {"type": "object", "properties": []}}, "parameters.properties"),
        ({"parameters": 5}, "parameters"),
        ({"strict": "yes"}, "strict"),
        ({"description": 5}, "description"),
    ],
)
def test_malformed_tool_is_refused_by_name(function: dict[str, Any], key: str) -> None:
    with pytest.raises(RequestError) as error:
        check_tools([tool("a"), {"function": {"name": "f", **function}}], "tools")

    assert error.value.param == f"tools[1].function.{key}"


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(RequestError, match="no other tool has") as error:
        check_tools([tool("a"), tool("b"), tool("a")], "tools")

    assert error.value.param == "tools[2].function.name"


@pytest.mark.parametrize("parameters", [{}, {"properties": {}}, {"type": ["object", "null"]}])
def test_tools_may_leave_things_out(parameters: dict[str, Any]) -> None:
    tools = [tool("a-b.c/d", parameters=parameters, strict=True, description=""), tool("x")]

    assert check_tools(tools, "tools") == tools
