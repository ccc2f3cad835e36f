"""Chat chunks in, output items and the events that tell of them out.

A response's output is a list of items that are written one after the other: reasoning, a message,
function calls. An item is announced, grows by deltas, and is closed when another kind of output
begins or the response ends. Events carry no sequence numbers here; the stream adds them.
"""

from __future__ import annotations

from typing import Any

from llmserve.api.openai_responses.items import new_id
from llmserve.api.sse import Event


class _OpenItem:
    """An item that grows. `done_type` and `delta_type` are the names of its events."""

    prefix = ""
    delta_type = ""
    done_type = ""

    def __init__(self, output_index: int) -> None:
        self.id = new_id(self.prefix)
        self.output_index = output_index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def open(self) -> list[Event]:
        return [self._event("response.output_item.added", item=self.item("in_progress"))]

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return self._event(self.delta_type, item_id=self.id, delta=text)

    def close(self, status: str) -> list[Event]:
        return [self._event("response.output_item.done", item=self.item(status))]

    def item(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": self.output_index, **fields}


class _PartItem(_OpenItem):
    """An item with one part, which has events of its own."""

    def part(self) -> dict[str, Any]:
        raise NotImplementedError

    def open(self) -> list[Event]:
        added = self._event(
            "response.content_part.added", item_id=self.id, content_index=0, part=self.part()
        )
        return [*super().open(), added]

    def add(self, text: str) -> Event:
        return {**super().add(text), "content_index": 0}

    def close(self, status: str) -> list[Event]:
        where = {"item_id": self.id, "content_index": 0}
        return [
            self._event(self.done_type, **where, text=self.text),
            self._event("response.content_part.done", **where, part=self.part()),
            *super().close(status),
        ]


class _Reasoning(_PartItem):
    prefix = "rs"
    delta_type = "response.reasoning_text.delta"
    done_type = "response.reasoning_text.done"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: str) -> dict[str, Any]:
        content = [self.part()] if self._texts else []
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": None,
            "status": status,
        }


class _Message(_PartItem):
    prefix = "msg"
    delta_type = "response.output_text.delta"
    done_type = "response.output_text.done"

    def __init__(self, output_index: int) -> None:
        super().__init__(output_index)
        self._is_empty = True
        self._rows: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._rows),
        }

    def open(self) -> list[Event]:
        events = super().open()
        self._is_empty = False
        return events

    def add_with_rows(self, text: str, rows: list[dict[str, Any]]) -> Event:
        self._rows += rows
        return {**self.add(text), "logprobs": rows}

    def close(self, status: str) -> list[Event]:
        done, *others = super().close(status)
        return [{**done, "logprobs": list(self._rows)}, *others]

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [] if self._is_empty else [self.part()],
            "status": status,
        }


class _Call(_OpenItem):
    prefix = "fc"
    delta_type = "response.function_call_arguments.delta"
    done_type = "response.function_call_arguments.done"

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        super().__init__(output_index)
        self._call_id = call_id
        self._name = name

    def close(self, status: str) -> list[Event]:
        done = self._event(self.done_type, item_id=self.id, name=self._name, arguments=self.text)
        return [done, *super().close(status)]

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }


class Output:
    """The output of one response. `add` takes chat chunks in, `finish` closes what is open."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None  # as in chat
        self._closed: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._call_index = -1

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items so far, the one that still grows included."""
        return [*self._closed, *([] if self._open is None else [self._open.item("in_progress")])]

    def add(self, chunk: Event) -> list[Event]:
        """The events of one chunk."""
        self.usage = chunk.get("usage") or self.usage
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                events += self._switch(_Reasoning)
                assert self._open is not None
                events.append(self._open.add(delta["reasoning"]))
            if delta.get("content"):
                events += self._add_text(delta["content"], choice.get("logprobs"))
            for call in delta.get("tool_calls") or []:
                events += self._add_call(call)
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        return events

    def finish(self, status: str) -> list[Event]:
        """No more comes. A completed response without any output has an empty message."""
        events = []
        if status == "completed" and self._open is None and not self._closed:
            events += self._begin(_Message(0))
        return events + self._close(status)

    def _add_text(self, text: str, logprobs: dict[str, Any] | None) -> list[Event]:
        events = self._switch(_Message)
        assert isinstance(self._open, _Message)
        rows = (logprobs or {}).get("content") or []
        return [*events, self._open.add_with_rows(text, rows)]

    def _add_call(self, call: dict[str, Any]) -> list[Event]:
        events = []
        if call["index"] != self._call_index or not isinstance(self._open, _Call):
            self._call_index = call["index"]
            events += self._close("completed")
            item = _Call(len(self._closed), call["id"], call["function"]["name"])
            events += self._begin(item)
        arguments = call["function"].get("arguments")
        if arguments:
            assert self._open is not None
            events.append(self._open.add(arguments))
        return events

    def _switch(self, kind: type[_PartItem]) -> list[Event]:
        """Makes an item of this kind the open one."""
        if isinstance(self._open, kind):
            return []
        events = self._close("completed")
        return events + self._begin(kind(len(self._closed)))

    def _begin(self, item: _OpenItem) -> list[Event]:
        self._open = item
        return item.open()

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._closed.append(item.item(status))
        return item.close(status)
