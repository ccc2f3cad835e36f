"""Builds the JSON of a call's arguments from parameters whose values are text up to a tag."""

from __future__ import annotations

import json
from collections.abc import Callable

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.schema_types import STRING, properties_of, types_of, value_to_json
from llmserve.tool_parsers.source import Malformed, Source, Steps


class ArgumentWriter:
    """Writes to `sink`: strings as they come, other values once they are complete."""

    def __init__(self, sink: Callable[[str], None], tool: Tool | None) -> None:
        """`tool` is None for a name that the request does not have."""
        self._sink = sink
        self._root = tool.parameters if tool else {}
        self._properties = properties_of(self._root)
        self._is_begun = False
        self._held_newline = ""

    def begin(self, key: str) -> None:
        """A value follows. A key that comes twice is written twice; readers take the last."""
        self._sink((", " if self._is_begun else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._is_begun = True

    def add_json(self, value: str) -> None:
        self._sink(value)

    def read_value(self, source: Source, key: str, end: str, *, is_framed: bool) -> Steps[None]:
        """Reads the value of a key, and the tag that ends it. is_framed: a newline before and one
        after the value are not part of it."""
        self.begin(key)
        if is_framed:
            yield from source.accept("\n")
        types = types_of(self._properties.get(key), self._root)
        if types == STRING:
            self._sink('"')
            self._held_newline = ""
            yield from source.until(end, sink=self._add_framed if is_framed else self._add_text)
            self._sink('"')
        else:
            text = yield from _read_json_or_text(source, end)
            self._sink(value_to_json(text.removesuffix("\n") if is_framed else text, types))
        yield from source.expect(end)

    def end(self) -> None:
        self._sink("}" if self._is_begun else "{}")

    def _add_text(self, text: str) -> None:
        self._sink(json.dumps(text, ensure_ascii=False)[1:-1])

    def _add_framed(self, text: str) -> None:
        """Holds the newline back that may be the last."""
        text = self._held_newline + text
        self._held_newline = "\n" if text.endswith("\n") else ""
        self._add_text(text.removesuffix("\n"))


def _read_json_or_text(source: Source, end: str) -> Steps[str]:
    """Reads up to the end: the first one, unless it is inside of JSON."""
    start = source.pos
    try:
        yield from source.skip_space()
        yield from source.json_value()
        yield from source.skip_space()
        is_json = bool((yield from source.at(end)))
    except Malformed:
        is_json = False
    if not is_json:
        source.pos = start
        yield from source.until(end)
    return source.text[start : source.pos]
