"""Checks of chat messages and tools: their form, before a template sees them.

Messages pass through as they came, unknown keys included, since a template may read any key.
"""

from __future__ import annotations

from typing import Any

from llmserve.api.fields import refuse, refuse_unsupported

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a part -> key of its text
_UNSUPPORTED_PARTS = (
    *("image_url", "input_audio", "file", "video_url", "audio_url", "image_embeds"),
)
MAX_NAME_CHARS = 128  # of a tool; what Anthropic allows, twice as many as OpenAI
# A conversation without text in one of these roles is a mistake of the caller.
_ROLES_WITH_CONTENT = ("system", "developer", "user", "tool")


def check_messages(value: object, field: str) -> list[dict[str, Any]]:
    """Raises RequestError naming the message and its key."""
    if not isinstance(value, list) or not value:
        refuse(field, value, "a list of at least one message")
    for position, message in enumerate(value):
        _check_message(message, f"{field}[{position}]")
    return value


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        refuse(where, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        refuse(f"{where}.role", role, "a role such as system, user, assistant or tool")
    content = message.get("content")
    if isinstance(content, list):
        for position, part in enumerate(content):
            _check_part(part, f"{where}.content[{position}]")
    elif content is None:
        if role in _ROLES_WITH_CONTENT:
            refuse(f"{where}.content", content, "a string or a list of text parts")
    elif not isinstance(content, str):
        refuse(f"{where}.content", content, "a string or a list of text parts")
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal"):
        if message.get(key) is not None and not isinstance(message[key], str):
            refuse(f"{where}.{key}", message[key], "a string")
    if message.get("tool_calls") is not None:
        _check_tool_calls(message["tool_calls"], f"{where}.tool_calls")


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict):
        refuse(where, part, "an object with a type")
    kind = part.get("type")
    if kind in _UNSUPPORTED_PARTS:
        refuse_unsupported(
            where, f"parts of the type {kind} need a model that takes more than text"
        )
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        refuse(f"{where}.type", kind, "text")
    if not isinstance(part.get(key), str):
        refuse(f"{where}.{key}", part.get(key), "a string")


def _check_tool_calls(calls: object, where: str) -> None:
    if not isinstance(calls, list):
        refuse(where, calls, "a list of tool calls")
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            refuse(f"{where}[{position}].function", function, "an object")
        if not isinstance(function.get("name"), str):
            refuse(f"{where}[{position}].function.name", function.get("name"), "a string")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | dict):
            refuse(f"{where}[{position}].function.arguments", arguments, "JSON as a string")


def check_tools(value: object, field: str) -> list[dict[str, Any]]:
    """Raises RequestError unless `value` is a list of function tools, each with its own name."""
    if not isinstance(value, list):
        refuse(field, value, "a list of tools")
    names: set[str] = set()
    for position, tool in enumerate(value):
        where = f"{field}[{position}]"
        if not isinstance(tool, dict):
            refuse(where, tool, "an object with the type function")
        if tool.get("type", "function") != "function":
            refuse(f"{where}.type", tool["type"], "function")
        function = tool.get("function")
        if not isinstance(function, dict):
            refuse(f"{where}.function", function, "an object with a name")
        name = _check_function(function, f"{where}.function")
        if name in names:
            refuse(f"{where}.function.name", name, "a name that no other tool has")
        names.add(name)
    return [tool if "type" in tool else {"type": "function", **tool} for tool in value]


def _check_function(function: dict[str, Any], where: str) -> str:
    """Returns its name."""
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        refuse(f"{where}.name", name, f"a string of 1 to {MAX_NAME_CHARS} characters")
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        refuse(f"{where}.description", description, "a string")
    if strict is not None and not isinstance(strict, bool):
        refuse(f"{where}.strict", strict, "true or false")
    parameters = function.get("parameters")
    if parameters is not None:
        check_object_schema(parameters, f"{where}.parameters")
    return name


def check_object_schema(schema: object, where: str) -> None:
    """Raises RequestError unless it may be a tool's parameters; a schema without a type may."""
    if not isinstance(schema, dict):
        refuse(where, schema, "a JSON schema of the type object")
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        refuse(f"{where}.type", types, "object")
    if not isinstance(schema.get("properties", {}), dict):
        refuse(f"{where}.properties", schema["properties"], "an object")
