"""The machinery that all formats share: finding markers, keeping content, giving out calls.

White space that has nothing but calls and ends of the text around it is dropped; all other text
that is not part of a well-formed call is content, character for character. A malformed call is
content up to what makes it malformed, and the search goes on there.
"""

from __future__ import annotations

import abc
import secrets

from llmserve.tool_parsers.base import CallDelta, ParsedDelta, Tool, ToolParser
from llmserve.tool_parsers.source import (
    Malformed,
    Source,
    Steps,
    alternatives,
    overlap,
)


class ScanningParser(ToolParser):
    """Reads text up to a marker, then lets the format read calls.

    A format gives `markers` (found anywhere), `bare_markers` (which count only where the text
    begins or a call just ended, white space aside) and `read_calls`.
    """

    markers: tuple[str, ...] = ()
    bare_markers: tuple[str, ...] = ()

    def __init__(self, tools: list[Tool], *, is_constrained: bool = False) -> None:
        super().__init__(tools, is_constrained=is_constrained)
        self.source = Source()
        self._delta = ParsedDelta()
        self._content: list[str] = []  # of the delta
        self._staged: list[CallDelta] = []
        self._num_calls = 0  # given out
        self._is_open = False  # a call has been given out in part
        self._kept = 0  # text[:_kept] of the source is accounted for: content, call or dropped
        self._is_at_edge = True  # nothing but white space since the text began or a call ended
        self._space = ""  # that white space
        self._steps = self._run()

    def feed(self, text: str) -> ParsedDelta:
        self.source.text += text
        return self._resume()

    def flush(self) -> ParsedDelta:
        self.source.is_ended = True
        return self._resume()

    @abc.abstractmethod
    def read_calls(self, marker: str) -> Steps[None]:
        """Reads on behind a marker. `commit` after each unit that stands or falls as a whole."""

    def call_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def tool(self, name: str) -> Tool | None:
        """The request's tool of this name."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call whose name is known."""
        is_allowed = self.allowed_names is None or name in self.allowed_names
        if not name or not is_allowed or not _is_unicode(name):
            raise Malformed
        delta = CallDelta(self._num_calls + len(self._staged), call_id or self.call_id(), name)
        if not self.is_constrained:
            self._staged.append(delta)
            return
        self._delta.calls.append(delta)
        self._num_calls += 1
        self._is_open = True
        self._end_content()

    def add_arguments(self, text: str) -> None:
        """The next piece of the last begun call's arguments."""
        if not self.is_constrained:
            self._staged[-1].arguments += text
            return
        index = self._num_calls - 1
        if self._delta.calls and self._delta.calls[-1].index == index:
            self._delta.calls[-1].arguments += text
        else:
            self._delta.calls.append(CallDelta(index, arguments=text))
        self._end_content()

    def read_object(self) -> Steps[None]:
        """Reads the last begun call's arguments, which are one object."""
        yield from self.source.skip_space()
        if not (yield from self.source.at("{")):
            raise Malformed
        yield from self.source.json_value(self.add_arguments)

    def commit(self) -> None:
        """The calls begun so far are well-formed, and what was read since is not content."""
        self._delta.calls += self._staged
        self._num_calls += len(self._staged)
        self._staged = []
        self._is_open = False
        self._end_content()

    def _resume(self) -> ParsedDelta:
        self._delta = ParsedDelta()
        self._content = []
        next(self._steps, None)
        self._delta.content = "".join(self._content)
        return self._delta

    def _run(self) -> Steps[None]:
        while marker := (yield from self._find_marker()):
            self.source.pos += len(marker)
            try:
                yield from self.read_calls(marker)
            except Malformed:
                self.is_broken = self.is_broken or self._is_open or bool(self._staged)
            self._staged = []
            if self._is_open:  # given out in part, it cannot become content again
                self._kept = self.source.pos
            self._is_open = False
            self._take_content()
        if not self._num_calls:
            self._content.append(self._space)

    def _find_marker(self) -> Steps[str]:
        """Reads up to the next marker; "" if there is none."""
        source = self.source
        if self._is_at_edge and self.bare_markers:
            yield from source.skip_space()
            marker = yield from source.at(*self.bare_markers)
            if marker:
                self._take_content()
                return marker
            source.pos = self._kept
        while True:
            found = alternatives(self.markers).search(source.text, source.pos)
            end = found.start() if found else overlap(source.text, self.markers)
            source.pos = max(end, source.pos)
            self._take_content()
            if found:
                return found[0]
            source.forget()
            self._kept = 0
            if not (yield from source.more()):
                source.pos = len(source.text)
                self._take_content()
                return ""

    def _take_content(self) -> None:
        """What was read and not accounted for is content."""
        self._add_content(self.source.text[self._kept : self.source.pos])
        self._kept = self.source.pos

    def _add_content(self, text: str) -> None:
        if self._is_at_edge:
            self._space += text
            if not self._space or self._space.isspace():
                return
            text, self._space = self._space, ""
            self._is_at_edge = False
        self._content.append(text)

    def _end_content(self) -> None:
        self._kept = self.source.pos
        if self._num_calls:
            self._is_at_edge = True
            self._space = ""


def _is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates, which cannot be sent."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
