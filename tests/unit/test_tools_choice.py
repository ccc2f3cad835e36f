"""tool_choice: what each form means, and which forms are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.api.tool_choice import ToolMode, read_tool_choice
from llmserve.errors import RequestError


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


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
