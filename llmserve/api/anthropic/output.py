"""Chat chunks in, content blocks and the events that tell of them out.

A message's content is a list of blocks that are written one after the other: thinking, text, tool
use. A block is started, grows by deltas, and is stopped when another begins or the message ends.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from llmserve.api.sse import Event
from llmserve.errors import EngineError

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class _Block:
    """A block that grows."""

    kind = "text"

    def __init__(self, index: int) -> None:
        self.index = index
        self._texts: list[str] = []

    def start(self) -> Event:
        return {
            "type": "content_block_start",
            "index": self.index,
            "content_block": self.as_json(is_started=True),
        }

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return self._delta(self.delta(text))

    def stop(self) -> list[Event]:
        return [{"type": "content_block_stop", "index": self.index}]

    def delta(self, text: str) -> dict[str, Any]:
        return {"type": "text_delta", "text": text}

    def as_json(self, *, is_started: bool = False) -> dict[str, Any]:
        return {"type": "text", "text": self._text, "citations": None}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class _Thinking(_Block):
    """Clients send the signature back with the block and drop blocks that have none. It is made
    of the text alone and never checked."""

    kind = "thinking"

    def stop(self) -> list[Event]:
        signature = {"type": "signature_delta", "signature": self._signature}
        return [self._delta(signature), *super().stop()]

    def delta(self, text: str) -> dict[str, Any]:
        return {"type": "thinking_delta", "thinking": text}

    def as_json(self, *, is_started: bool = False) -> dict[str, Any]:
        signature = "" if is_started else self._signature
        return {"type": "thinking", "thinking": self._text, "signature": signature}

    @property
    def _signature(self) -> str:
        return hashlib.sha256(self._text.encode("utf-8", "replace")).hexdigest()


class _ToolUse(_Block):
    kind = "tool_use"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._id = call_id
        self._name = name

    def delta(self, text: str) -> dict[str, Any]:
        return {"type": "input_json_delta", "partial_json": text}

    def as_json(self, *, is_started: bool = False) -> dict[str, Any]:
        """Arguments that were cut off by max_tokens are no JSON; their input is empty."""
        try:
            arguments = {} if is_started else orjson.loads(self._text or "{}")
        except orjson.JSONDecodeError:
            arguments = {}
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": arguments}


class Content:
    """The content of one message. `add` takes chat chunks in, `finish` stops the open block."""

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._stop: int | str | None = None
        self._blocks: list[_Block] = []
        self._is_open = False
        self._call_index = -1

    @property
    def blocks(self) -> list[dict[str, Any]]:
        return [block.as_json() for block in self._blocks]

    @property
    def stop_reason(self) -> str:
        """Raises EngineError if the message has no proper end."""
        if isinstance(self._stop, str):
            return "stop_sequence"
        if any(block.kind == "tool_use" for block in self._blocks):
            return "max_tokens" if self._finish_reason == "length" else "tool_use"
        if self._finish_reason not in _STOP_REASONS:
            raise EngineError("the server aborted the message")
        return _STOP_REASONS[self._finish_reason]

    @property
    def stop_sequence(self) -> str | None:
        return self._stop if isinstance(self._stop, str) else None

    @property
    def usage(self) -> dict[str, Any]:
        return messages_usage(self._usage)

    def add(self, chunk: Event) -> list[Event]:
        """The events of one chunk."""
        self._usage = chunk.get("usage") or self._usage
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                events += self._add_text(_Thinking, delta["reasoning"])
            if delta.get("content"):
                events += self._add_text(_Block, delta["content"])
            for call in delta.get("tool_calls") or []:
                events += self._add_call(call)
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            self._stop = choice.get("stop_reason") or self._stop
        return events

    def finish(self) -> list[Event]:
        """No more comes."""
        if not self._is_open:
            return []
        self._is_open = False
        return self._blocks[-1].stop()

    def _add_text(self, kind: type[_Block], text: str) -> list[Event]:
        events = []
        if not self._is_open or type(self._blocks[-1]) is not kind:
            events += self._begin(kind(len(self._blocks)))
        return [*events, self._blocks[-1].add(text)]

    def _add_call(self, call: dict[str, Any]) -> list[Event]:
        events = []
        if call["index"] != self._call_index or not isinstance(self._blocks[-1], _ToolUse):
            self._call_index = call["index"]
            block = _ToolUse(len(self._blocks), call["id"], call["function"]["name"])
            events += self._begin(block)
        arguments = call["function"].get("arguments")
        return [*events, self._blocks[-1].add(arguments)] if arguments else events

    def _begin(self, block: _Block) -> list[Event]:
        events = self.finish()
        self._blocks.append(block)
        self._is_open = True
        return [*events, block.start()]


def messages_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Chat's usage in the words of Messages, where cached tokens do not count as input."""
    details = usage.get("prompt_tokens_details") or {}
    num_cached_tokens = details.get("cached_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": usage.get("completion_tokens", 0),
    }
