"""Puts the messages of a request into the form that a chat template expects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llmserve.errors import RequestError
from llmserve.tokenizer.template_traits import TemplateTraits

Message = dict[str, Any]

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def prepare_messages(
    messages: Iterable[Mapping[str, Any]], traits: TemplateTraits
) -> list[Message]:
    """New messages; the given ones are left alone. No text is lost. Raises RequestError.

    As in vLLM: contents become strings (parts joined by line breaks) or lists of parts, and
    arguments of tool calls become objects. A developer message becomes a system message where the
    template would drop it or refuse it.
    """
    prepared: list[Message] = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        # Many templates write "None" for a key that is there but null.
        result = {key: value for key, value in message.items() if value is not None}
        content = message.get("content") or message.get("refusal") or message.get("content")
        result["content"] = _content(content, traits, where)
        _name_reasoning(result)
        if isinstance(result.get("tool_calls"), list):
            result["tool_calls"] = [_tool_call(c, traits) for c in result["tool_calls"]]
        if result.get("role") == "developer" and not traits.takes_developer_role:
            result["role"] = "system"
            if prepared and prepared[-1].get("role") == "system":
                _append_content(prepared[-1], result["content"])
                continue
        prepared.append(result)
    return prepared


def _content(content: Any, traits: TemplateTraits, where: str) -> Any:
    if content is None and traits.takes_null_content:
        return None
    if isinstance(content, str) and traits.takes_string_content:
        return content
    texts = [content] if isinstance(content, str) else _texts(content or [], where)
    if traits.content_format == "string" or (not texts and traits.takes_string_content):
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", param="messages")
    texts = []
    for position, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else None
        if isinstance(part, dict) and isinstance(kind, str) and kind in _TEXT_KEYS:
            text = part.get(_TEXT_KEYS[kind])
        if not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{position}] is not a text part; this model takes text only",
                param="messages",
            )
        texts.append(text)
    return texts


def _append_content(message: Message, content: Any) -> None:
    before = message["content"]
    if isinstance(before, list) and isinstance(content, list):
        message["content"] = before + content
    else:
        message["content"] = f"{before or ''}\n\n{content or ''}"


def _name_reasoning(message: Message) -> None:
    """Templates read reasoning as `reasoning_content`, some as `thinking` or `reasoning`."""
    for key in _REASONING_KEYS:
        if message.get(key) is not None:
            for name in _REASONING_KEYS:
                message.setdefault(name, message[key])
            return


def _tool_call(call: Any, traits: TemplateTraits) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if traits.takes_argument_objects:
        arguments = _parse_arguments(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: Any) -> Any:
    """Models write broken JSON at times: such arguments stay the string that they are."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
