"""Finds the end of a JSON value in text that is still arriving, by the strict grammar of RFC 8259.

Each character is looked at once, however the text is cut. Nothing is decoded.
"""

from __future__ import annotations

import enum
import re

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


class _Expects(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # after [
    KEY = enum.auto()
    KEY_OR_END = enum.auto()  # after {
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()


class JsonScanner:
    """One value. Exactly one of "needs more text", `is_done` and `is_bad` holds after a call."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_bad = False
        self._closers: list[str] = []
        self._expects = _Expects.VALUE
        self._is_in_string = False
        self._word: str | None = None  # a number or a literal so far

    def advance(self, text: str, pos: int) -> int:
        """Reads on at `pos`; returns where it stopped: behind the value, at what makes it bad, or
        where more text is needed."""
        while pos < len(text) and not self.is_done and not self.is_bad:
            if self._is_in_string:
                end = self._advance_string(text, pos)
                if end == pos and self._is_in_string:
                    break  # an escape that is not complete
                pos = end
            elif self._word is not None:
                pos = self._advance_word(text, pos)
            else:
                space = _SPACE.match(text, pos)
                pos = space.end() if space else pos
                if pos < len(text):
                    pos = self._advance_token(text[pos], pos)
        return pos

    def end(self) -> None:
        """The text has ended, which completes a number or a literal."""
        if self._word is not None:
            self._end_word()

    def _advance_string(self, text: str, pos: int) -> int:
        plain = _PLAIN.match(text, pos)
        end = plain.end() if plain else pos
        if end == len(text):
            return end
        if text[end] == '"':
            self._is_in_string = False
            if self._expects is not _Expects.COLON:
                self._end_value()
            return end + 1
        escape = _ESCAPE.match(text, end)
        if escape:
            return escape.end()
        self.is_bad = _PARTIAL_ESCAPE.fullmatch(text, end) is None
        return end

    def _advance_word(self, text: str, pos: int) -> int:
        word = _WORD.match(text, pos)
        end = word.end() if word else pos
        self._word = (self._word or "") + text[pos:end]
        if end < len(text):
            self._end_word()
        return end

    def _end_word(self) -> None:
        word, self._word = self._word or "", None
        if _SCALAR.fullmatch(word):
            self._end_value()
        else:
            self.is_bad = True

    def _advance_token(self, char: str, pos: int) -> int:
        expects = self._expects
        if self._closers and char == self._closers[-1] and self._may_close():
            self._closers.pop()
            self._end_value()
        elif expects in (_Expects.KEY, _Expects.KEY_OR_END) and char == '"':
            self._is_in_string = True
            self._expects = _Expects.COLON
        elif expects is _Expects.COLON and char == ":":
            self._expects = _Expects.VALUE
        elif expects is _Expects.COMMA_OR_END and char == ",":
            is_object = self._closers[-1] == "}"
            self._expects = _Expects.KEY if is_object else _Expects.VALUE
        elif expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            return self._begin_value(char, pos)
        else:
            self.is_bad = True
            return pos
        return pos + 1

    def _may_close(self) -> bool:
        return self._expects in (
            _Expects.COMMA_OR_END,
            _Expects.KEY_OR_END,
            _Expects.VALUE_OR_END,
        )

    def _begin_value(self, char: str, pos: int) -> int:
        if char == "{":
            self._closers.append("}")
            self._expects = _Expects.KEY_OR_END
        elif char == "[":
            self._closers.append("]")
            self._expects = _Expects.VALUE_OR_END
        elif char == '"':
            self._is_in_string = True
            self._expects = _Expects.COMMA_OR_END
        elif _WORD.fullmatch(char):
            self._word = ""
            return pos
        else:
            self.is_bad = True
            return pos
        return pos + 1

    def _end_value(self) -> None:
        self.is_done = not self._closers
        self._expects = _Expects.COMMA_OR_END


def is_json(text: str) -> bool:
    """Whether the text is one JSON value, white space around it allowed."""
    scanner = JsonScanner()
    pos = scanner.advance(text, 0)
    if not scanner.is_done:
        scanner.end()
    return scanner.is_done and not text[pos:].strip(" \t\n\r")
