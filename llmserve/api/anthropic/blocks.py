"""Content blocks: their form, and the chat messages that they stand for.

A user's turn may hold the results of several tools, which are messages of their own in a chat.
Turns of one role that follow each other are one turn, as Anthropic has it.
"""

from __future__ import annotations

from typing import Any

import orjson

from llmserve.api.fields import refuse, refuse_unsupported

_ROLES = ("user", "assistant", "system")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def check_messages(value: object, field: str) -> list[dict[str, Any]]:
    """Messages whose content is a list of blocks. Raises RequestError."""
    if not isinstance(value, list) or not value:
        refuse(field, value, "a list of at least one message")
    return [_checked_message(item, f"{field}[{position}]") for position, item in enumerate(value)]


def check_system(value: object, field: str) -> list[str]:
    """The system prompt as texts. Raises RequestError."""
    if isinstance(value, str):
        return [value] if value else []
    blocks = _checked_blocks(value, field, "system")
    return [block["text"] for block in blocks if block["text"]]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        refuse(where, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": [{"type": "text", "text": content}]}
    return {"role": role, "content": _checked_blocks(content, f"{where}.content", role)}


def _checked_blocks(blocks: object, where: str, role: str) -> list[dict[str, Any]]:
    if not isinstance(blocks, list):
        refuse(where, blocks, "a string or a list of content blocks")
    for position, block in enumerate(blocks):
        _check_block(block, f"{where}[{position}]", _BLOCKS[role])
    return blocks


def _check_block(block: object, where: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(block, dict):
        refuse(where, block, "an object with a type")
    kind = block.get("type")
    if not isinstance(kind, str):
        refuse(f"{where}.type", kind, f"one of {', '.join(allowed)}")
    if kind not in allowed:
        refuse_unsupported(
            where, f"blocks of the type {kind!r}; it must be one of {', '.join(allowed)} here"
        )
    for key in _TEXT_KEYS.get(kind, ()):
        if not isinstance(block.get(key), str):
            refuse(f"{where}.{key}", block.get(key), "a string")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        refuse(f"{where}.input", block.get("input"), "an object")
    content = block.get("content")
    if kind == "tool_result" and content is not None and not isinstance(content, str):
        _checked_blocks(content, f"{where}.content", "system")


_TEXT_KEYS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}


def to_chat(system: list[str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat messages."""
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": _content(system)})
    for role, blocks in _turns(messages):
        if role == "assistant":
            chat.append(_assistant_message(blocks))
            continue
        results = [block for block in blocks if block["type"] == "tool_result"]
        chat += [_tool_message(block) for block in results]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        if texts or not results:
            chat.append({"role": role, "content": _content(texts)})
    return chat


def is_prefilled(messages: list[dict[str, Any]]) -> bool:
    """Whether the last turn is the beginning of the answer."""
    last = messages[-1]
    return last["role"] == "assistant" and any(
        block["type"] == "text" and block["text"] for block in last["content"][-1:]
    )


def _turns(messages: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        if turns and turns[-1][0] == message["role"]:
            turns[-1][1].extend(message["content"])
        else:
            turns.append((message["role"], list(message["content"])))
    return turns


def _assistant_message(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    if text or not calls:
        message["content"] = text
    if thinking:
        message["reasoning"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block["input"]).decode()
    return {
        "id": block["id"],
        "type": "function",
        "function": {"name": block["name"], "arguments": arguments},
    }


def _tool_message(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = _content([part["text"] for part in content])
    message = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    if block.get("is_error"):
        message["is_error"] = True  # for templates that know it
    return message


def _content(texts: list[str]) -> str | list[dict[str, Any]]:
    """One text is written as a plain string, which every template takes."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
