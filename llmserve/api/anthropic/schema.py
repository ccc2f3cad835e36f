"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from llmserve.api.anthropic.blocks import check_messages, check_system
from llmserve.api.fields import checked, integer, real, refuse, refuse_unsupported, text_list
from llmserve.api.messages import check_object_schema

_TOOL_CHOICES = ("auto", "any", "tool", "none")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")

_STRING = {"type": "string"}
_BLOCKS = {"type": "array", "items": {"type": "object", "required": ["type"]}}
_CONTENT = {"anyOf": [_STRING, _BLOCKS]}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
    },
}
_TOOL = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "minLength": 1},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
    },
}
_TOOL_CHOICE = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": list(_TOOL_CHOICES)},
        "name": _STRING,
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
}
_THINKING = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["enabled", "disabled", "adaptive"]},
        "budget_tokens": {"type": "integer", "minimum": 1},
        "display": {"enum": ["summarized", "omitted", None]},
    },
}
_OUTPUT_CONFIG = {
    "type": "object",
    "properties": {"effort": {"enum": [*_EFFORTS, None]}, "format": {"type": ["object", "null"]}},
}
_OUTPUT_FORMAT = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
}
_STOP = {"type": "array", "items": {"type": "string", "minLength": 1}}


def _tools(value: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        refuse(field, value, "a list of tools")
    for position, tool in enumerate(value):
        where = f"{field}[{position}]"
        if not isinstance(tool, dict):
            refuse(where, tool, "an object with name and input_schema")
        kind = tool.get("type") or "custom"
        if kind != "custom":
            refuse_unsupported(where, f"tools of the type {kind!r} are not built in; use custom")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            refuse(f"{where}.name", tool.get("name"), "the name of a tool")
        check_object_schema(tool.get("input_schema"), f"{where}.input_schema")
    return value


def _tool_choice(value: object, field: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in _TOOL_CHOICES:
        refuse(f"{field}.type", kind, f"one of {', '.join(_TOOL_CHOICES)}")
    if kind == "tool" and not isinstance(value.get("name"), str):
        refuse(f"{field}.name", value.get("name"), "the name of a tool in tools")
    is_single = value.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        refuse(f"{field}.disable_parallel_tool_use", is_single, "true or false")
    return value


def _thinking(value: object, field: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("enabled", "disabled", "adaptive"):
        refuse(f"{field}.type", kind, "one of enabled, disabled, adaptive")
    budget = value.get("budget_tokens")
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        refuse(f"{field}.budget_tokens", budget, "an integer of at least 1")
    if value.get("display") not in (None, "summarized", "omitted"):
        refuse(f"{field}.display", value["display"], "summarized or omitted")
    return value


def _output_config(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(field, value, "an object")
    if value.get("effort") is not None and value["effort"] not in _EFFORTS:
        refuse(f"{field}.effort", value["effort"], f"one of {', '.join(_EFFORTS)}")
    if value.get("format") is not None:
        _output_format(value["format"], f"{field}.format")
    return value


def _output_format(value: object, field: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind != "json_schema" or not isinstance(schema, dict):
        refuse(field, value, "an object with the type json_schema and a schema")
    return value


def _stop_sequences(value: object, field: str) -> list[str]:
    return text_list(value, field)


def _must_be_empty(value: object, field: str) -> None:
    if value not in ("", [], {}):
        refuse_unsupported(field, "leave it out")


Unsupported = Annotated[None, checked(_must_be_empty, {"enum": ["", [], {}]})]


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens: the fields that decide the prompt."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str
    messages: Annotated[list[dict[str, Any]], checked(check_messages, _MESSAGES)]
    system: Annotated[list[str], checked(check_system, _CONTENT)] = []
    tools: Annotated[list[dict[str, Any]], checked(_tools, {"type": "array", "items": _TOOL})] = []
    tool_choice: Annotated[dict[str, Any] | None, checked(_tool_choice, _TOOL_CHOICE)] = None
    thinking: Annotated[dict[str, Any] | None, checked(_thinking, _THINKING)] = None
    output_config: Annotated[dict[str, Any], checked(_output_config, _OUTPUT_CONFIG)] = {}
    output_format: Annotated[dict[str, Any] | None, checked(_output_format, _OUTPUT_FORMAT)] = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, integer(1)]
    temperature: Annotated[float, real(0, 1)] | None = None
    top_p: Annotated[float, real(0, 1, is_low_excluded=True)] | None = None
    top_k: Annotated[int, integer(-1, requirement="-1 or 0 (off) or a positive integer")] | None = (
        None
    )
    stop_sequences: Annotated[list[str], checked(_stop_sequences, _STOP)] = []
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Unsupported = None
    mcp_servers: Unsupported = None
    context_management: Unsupported = None


# Accepted because clients send them; they change nothing here.
NO_EFFECT_FIELDS = frozenset({"metadata", "service_tier"})
