"""tool_choice: which tools of a request may be called, and whether one must be."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from llmserve.api.fields import refuse
from llmserve.errors import RequestError
from llmserve.tool_parsers import Tool
from llmserve.tool_parsers.schema_types import resolve

_CHOICES = "none, auto, required, an object naming a tool, or one with allowed_tools"
# Where one of these says what an object may hold, a schema without properties does not mean {}.
_OTHER_MEMBERS = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("minProperties", "required", "dependentSchemas", "dependentRequired"),
        *("allOf", "anyOf", "oneOf", "not", "if", "enum", "const"),
    }
)


class ToolMode(enum.Enum):
    """What the model may do."""

    NONE = "none"  # its text is not searched for calls
    AUTO = "auto"
    REQUIRED = "required"  # one call at least, and nothing else
    NAMED = "named"  # one call of one tool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tools` are those that may be called. A forced call always follows its tool's schema."""

    mode: ToolMode
    tools: tuple[Tool, ...] = ()
    is_restricted: bool = False  # the request has tools that may not be called

    @property
    def is_forced(self) -> bool:
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def has_strict_tool(self) -> bool:
        return any(tool.is_strict for tool in self.tools)


def read_tool_choice(choice: object, tools: list[dict[str, Any]]) -> ToolChoice:
    """The default is auto with tools and none without. Raises RequestError."""
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolChoice(ToolMode.NONE)
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        refuse("tool_choice", choice, _CHOICES)
    if not tools:
        raise RequestError("tool_choice needs tools; the request has none", param="tool_choice")
    if choice == "auto":
        return ToolChoice(ToolMode.AUTO, _tools(tools, is_forced=False))
    if choice == "required":
        return ToolChoice(ToolMode.REQUIRED, _tools(tools, is_forced=True))
    assert isinstance(choice, dict)
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _read_allowed_tools(choice, tools)
    if kind != "function":
        refuse("tool_choice.type", kind, "function or allowed_tools")
    name = _name(choice, tools, "tool_choice")
    named = [tool for tool in tools if tool["function"]["name"] == name]
    return ToolChoice(ToolMode.NAMED, _tools(named[:1], is_forced=True))


def _read_allowed_tools(choice: dict[str, Any], tools: list[dict[str, Any]]) -> ToolChoice:
    """`mode` and `tools` in an object `allowed_tools` (chat) or beside the type (responses)."""
    where, allowed = "tool_choice", choice
    if "allowed_tools" in choice:
        where, allowed = "tool_choice.allowed_tools", choice["allowed_tools"]
    if not isinstance(allowed, dict):
        refuse(where, allowed, "an object with mode and tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        refuse(f"{where}.mode", mode, "auto or required")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        refuse(f"{where}.tools", listed, "a list of at least one tool")
    names = {
        _name(entry, tools, f"{where}.tools[{position}]") for position, entry in enumerate(listed)
    }
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    is_forced = mode == "required"
    return ToolChoice(ToolMode(mode), _tools(chosen, is_forced=is_forced), is_restricted=True)


def _name(entry: object, tools: list[dict[str, Any]], where: str) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in its flat spelling."""
    if not isinstance(entry, dict):
        refuse(where, entry, "an object naming a tool")
    function = entry.get("function", entry)
    name = function.get("name") if isinstance(function, dict) else None
    field = f"{where}.function.name"
    if not isinstance(name, str):
        refuse(field, name, "the name of a tool")
    if name not in [tool["function"]["name"] for tool in tools]:
        refuse(field, name, "the name of a tool in tools")
    return name


def _tools(tools: list[dict[str, Any]], *, is_forced: bool) -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=tool["function"]["name"],
            parameters=_parameters(tool["function"]),
            is_strict=is_forced or bool(tool["function"].get("strict")),
        )
        for tool in tools
    )


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """A tool that declares no parameters takes {} only; a model would invent some without end."""
    parameters: dict[str, Any] = function.get("parameters") or {}
    top = resolve(parameters, parameters)
    if top.get("properties") or any(top.get(key) for key in _OTHER_MEMBERS):
        return parameters
    if "additionalProperties" in top:
        return parameters
    return {"type": "object", "properties": {}, "additionalProperties": False}
