"""Finds tool calls in the text that a model writes; text in, content and calls out.

A parser is fed the same text whether the answer is streamed or not, so both give the same calls.
A call appears once it is complete; text that only looks like one comes back as content.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmserve.api.schemas import ChatRequest
from llmserve.config import FrontendConfig


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments` is a JSON object as text."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class ParsedText:
    """What a piece of text added to the answer."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallParser(Protocol):
    """One per choice."""

    def feed(self, text: str) -> ParsedText:
        """Adds text; returns what it completed."""
        ...

    def flush(self) -> ParsedText:
        """The text has ended."""
        ...


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated (Hermes 2 Pro, Qwen).

    Content before the first call is kept; white space between and after calls is not. A last
    call without its closing tag counts if its JSON is complete.
    """

    _OPEN = "<tool_call>"
    _CLOSE = "</tool_call>"

    def __init__(self) -> None:
        self._pending = ""  # not decided yet
        self._is_in_call = False
        self._num_calls = 0
        self._space = ""  # white space after a call, dropped unless text follows

    def feed(self, text: str) -> ParsedText:
        self._pending += text
        parsed = ParsedText()
        while self._advance(parsed):
            pass
        return parsed

    def flush(self) -> ParsedText:
        parsed = ParsedText()
        pending, self._pending = self._pending, ""
        if self._is_in_call:
            self._add_call(parsed, pending, closing="")
        else:
            self._add_content(parsed, pending)
        return parsed

    def _advance(self, parsed: ParsedText) -> bool:
        """Consumes up to the next tag; False when more text is needed."""
        tag = self._CLOSE if self._is_in_call else self._OPEN
        before, found, after = self._pending.partition(tag)
        if found:
            if self._is_in_call:
                self._add_call(parsed, before, closing=found)
            else:
                self._add_content(parsed, before)
            self._pending = after
            self._is_in_call = not self._is_in_call
            return True
        if not self._is_in_call:
            num_held = _overlap(self._pending, tag)
            cut = len(self._pending) - num_held
            self._add_content(parsed, self._pending[:cut])
            self._pending = self._pending[cut:]
        return False

    def _add_content(self, parsed: ParsedText, text: str) -> None:
        if self._num_calls:
            text = self._space + text
            self._space = text[len(text.rstrip()) :]
            text = text.rstrip()
        parsed.content += text

    def _add_call(self, parsed: ParsedText, body: str, *, closing: str) -> None:
        call = _read_call(body)
        if call is None:
            self._add_content(parsed, self._OPEN + body + closing)
            return
        name, arguments = call
        parsed.calls.append(
            ToolCall(self._num_calls, name, json.dumps(arguments, ensure_ascii=False))
        )
        self._num_calls += 1
        self._space = ""


PARSERS: dict[str, type[HermesParser]] = {"hermes": HermesParser}


def tool_call_parser(request: ChatRequest, config: FrontendConfig) -> ToolCallParser | None:
    """A new parser for a choice of the request, or None if its text is not searched for calls."""
    if not config.enable_auto_tool_choice or config.tool_call_parser is None:
        return None
    if not request.tools or request.tool_choice == "none":
        return None
    return PARSERS[config.tool_call_parser]()


def _read_call(body: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call's JSON, or None if it is not one."""
    try:
        call = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
