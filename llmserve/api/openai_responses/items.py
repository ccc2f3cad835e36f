"""Input items: their form, and the chat messages that they stand for.

What a model writes in one turn is several items (reasoning, message, function calls) and one chat
message; here they become that one message again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from llmserve.api.fields import refuse, refuse_unsupported

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}  # type of a part -> key of its text
_OTHER_PARTS = ("input_image", "input_file", "input_audio", "computer_screenshot")
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def check_input(value: object, field: str) -> list[dict[str, Any]]:
    """The input as a list of items, each with a type and an id. Raises RequestError."""
    if isinstance(value, str):
        value = [{"role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list) or not value:
        refuse(field, value, "a string or a list of at least one item")
    return [_checked_item(item, f"{field}[{position}]") for position, item in enumerate(value)]


def _checked_item(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        refuse(where, item, "an object with a type, or with role and content")
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str):
        refuse(f"{where}.type", kind, f"one of {', '.join(_ID_PREFIXES)}")
    if kind not in _ID_PREFIXES:
        allowed = ", ".join(_ID_PREFIXES)
        refuse_unsupported(where, f"items of the type {kind!r}; it must be one of {allowed}")
    _CHECKS[kind](item, where)
    item_id = item.get("id") or new_id(_ID_PREFIXES[kind])
    if not isinstance(item_id, str):
        refuse(f"{where}.id", item_id, "a string")
    checked = {**item, "type": kind, "id": item_id}
    if kind == "message":
        checked["status"] = item.get("status") or "completed"
        if isinstance(item["content"], str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            checked["content"] = [{"type": part, "text": item["content"]}]
    return checked


def _check_message(item: dict[str, Any], where: str) -> None:
    if item.get("role") not in _ROLES:
        refuse(f"{where}.role", item.get("role"), f"one of {', '.join(_ROLES)}")
    _check_content(item.get("content"), f"{where}.content")


def _check_content(content: object, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        refuse(where, content, "a string or a list of text parts")
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _OTHER_PARTS:
            refuse_unsupported(
                f"{where}[{position}]",
                f"parts of the type {kind} need a model that takes more than text",
            )
        if not isinstance(part, dict) or kind not in _TEXT_PARTS:
            refuse(f"{where}[{position}].type", kind, f"one of {', '.join(_TEXT_PARTS)}")
        key = _TEXT_PARTS[kind]
        if not isinstance(part.get(key), str):
            refuse(f"{where}[{position}].{key}", part.get(key), "a string")


def _check_call(item: dict[str, Any], where: str) -> None:
    for key in ("name", "arguments", "call_id"):
        if not isinstance(item.get(key), str):
            refuse(f"{where}.{key}", item.get(key), "a string")


def _check_call_output(item: dict[str, Any], where: str) -> None:
    if not isinstance(item.get("call_id"), str):
        refuse(f"{where}.call_id", item.get("call_id"), "a string")
    _check_content(item.get("output"), f"{where}.output")


def _check_reasoning(item: dict[str, Any], where: str) -> None:
    for key in ("content", "summary"):
        parts = item.get(key)
        is_list = isinstance(parts, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        )
        if parts is not None and not is_list:
            refuse(f"{where}.{key}", parts, "a list of objects with a text")
    if item.get("encrypted_content") and not _reasoning_text(item):
        refuse_unsupported(f"{where}.encrypted_content", "only reasoning in plain text is read")


_CHECKS = {
    "message": _check_message,
    "function_call": _check_call,
    "function_call_output": _check_call_output,
    "reasoning": _check_reasoning,
}


def to_messages(instructions: str | None, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat messages."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            _turn(messages, is_new=_has_output)["reasoning"] = _reasoning_text(item)
        elif kind == "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            _turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = item["output"]
            if not isinstance(content, str):
                content = _text(content)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif item["role"] == "assistant":
            turn = _turn(messages, is_new=_has_content_alone)
            turn["content"] = (turn["content"] or "") + _text(item["content"])
        else:
            messages.append({"role": item["role"], "content": _text_parts(item["content"])})
    return messages


def _turn(messages: list[dict[str, Any]], is_new: Any = lambda message: False) -> dict[str, Any]:
    """The assistant's message that the next item belongs to."""
    if not messages or messages[-1]["role"] != "assistant" or is_new(messages[-1]):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _has_output(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls"))


def _has_content_alone(message: dict[str, Any]) -> bool:
    """Text after text is a turn of its own; text around calls is one turn."""
    return message["content"] is not None and not message.get("tool_calls")


def _text(parts: list[dict[str, Any]]) -> str:
    return "".join(part[_TEXT_PARTS[part["type"]]] for part in parts)


def _text_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One part is written as a plain string, which every template takes."""
    texts = [part[_TEXT_PARTS[part["type"]]] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _reasoning_text(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part["text"] for part in parts)
