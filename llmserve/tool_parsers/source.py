"""Text that is still arriving, read by generators.

A reading function is a generator that yields whenever it needs more text than there is. Since it
decides nothing before the text that the decision rests on is there, its result cannot depend on
how the text was cut. Functions that fail leave the position at what they could not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from llmserve.tool_parsers.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]

_SPACE = re.compile(r"[ \t\n\r]*")


class Malformed(Exception):
    """The text is not a call."""


class Source:
    """`text[:pos]` has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_ended = False

    def forget(self) -> None:
        """Drops the text that has been read."""
        self.text = self.text[self.pos :]
        self.pos = 0

    def more(self) -> Steps[bool]:
        """Waits for more text; False if there is none."""
        size = len(self.text)
        while len(self.text) == size:
            if self.is_ended:
                return False
            yield
        return True

    def has(self, size: int) -> Steps[bool]:
        """Whether there are `size` more characters."""
        while len(self.text) < self.pos + size:
            if not (yield from self.more()):
                return False
        return True

    def at(self, *options: str) -> Steps[str]:
        """Which option comes next, "" if none. Reads nothing. No option may begin another."""
        while True:
            for option in options:
                if self.text.startswith(option, self.pos):
                    return option
            rest = self.text[self.pos : self.pos + max(map(len, options))]
            if not any(option.startswith(rest) for option in options):
                return ""
            if not (yield from self.more()):
                return ""

    def accept(self, *options: str) -> Steps[str]:
        """Reads one of the options if it comes next."""
        found = yield from self.at(*options)
        self.pos += len(found)
        return found

    def expect(self, *options: str) -> Steps[str]:
        """Reads one of the options."""
        found = yield from self.accept(*options)
        if not found:
            raise Malformed
        return found

    def skip_space(self) -> Steps[None]:
        """Reads white space (as JSON has it)."""
        yield from self.take(_SPACE)

    def take(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads the longest run of what the pattern, a repeated set of characters, matches."""
        start = self.pos
        while True:
            found = pattern.match(self.text, self.pos)
            self.pos = found.end() if found else self.pos
            if self.pos < len(self.text) or not (yield from self.more()):
                return self.text[start : self.pos]

    def until(self, *ends: str, sink: Callable[[str], None] | None = None) -> Steps[str]:
        """Reads up to the first of the ends, which stays. `sink` gets the text as it comes."""
        start = self.pos
        pattern = alternatives(ends)
        while True:
            found = pattern.search(self.text, self.pos)
            before = self.pos
            self.pos = found.start() if found else max(self.pos, overlap(self.text, ends))
            if sink and self.pos > before:
                sink(self.text[before : self.pos])
            if found:
                return self.text[start : self.pos]
            if not (yield from self.more()):
                raise Malformed

    def json_value(self, sink: Callable[[str], None] | None = None) -> Steps[str]:
        """Reads a JSON value and returns its text as it is. `sink` gets it as it comes."""
        start = self.pos
        scanner = JsonScanner()
        while True:
            before = self.pos
            self.pos = scanner.advance(self.text, before)
            if scanner.is_bad:
                raise Malformed
            if sink and self.pos > before:
                sink(self.text[before : self.pos])
            if not scanner.is_done and not (yield from self.more()):
                scanner.end()
                if not scanner.is_done:
                    raise Malformed
            if scanner.is_done:
                return self.text[start : self.pos]

    def json_string(self) -> Steps[str]:
        """Reads a JSON string and returns what it says."""
        if not (yield from self.at('"')):
            raise Malformed
        value: str = json.loads((yield from self.json_value()))
        return value


def alternatives(texts: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of the texts, none of which may be inside another; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def overlap(text: str, ends: tuple[str, ...]) -> int:
    """Where the longest end of `text` that begins one of `ends` starts; its length if none does."""
    for size in range(min(len(text), max(map(len, ends), default=1) - 1), 0, -1):
        tail = text[-size:]
        if any(end.startswith(tail) for end in ends):
            return len(text) - size
    return len(text)
