"""Thinking between two markers, at the beginning of the output."""

from __future__ import annotations

import enum
from typing import ClassVar

from llmserve.reasoning_parsers.base import ReasoningDelta, ReasoningParser, Thinking
from llmserve.reasoning_parsers.markers import find_first, open_overlap


class _At(enum.Enum):
    BEGINNING = enum.auto()  # white space and a start marker may come
    THINKING = enum.auto()
    CONTENT = enum.auto()


class TaggedParser(ReasoningParser):
    """Text from a start marker to an end marker is reasoning, what follows is content.

    A start marker counts at the beginning of the output only, after white space at most, which is
    dropped with it. Thinking that never ends is reasoning to the end.
    """

    start_markers: ClassVar[tuple[str, ...]]
    end_markers: ClassVar[tuple[str, ...]]
    # Markers of tool calls; they end the thinking and belong to the content.
    call_markers: ClassVar[tuple[str, ...]] = ()
    # Output without a start marker is thinking, unless the prompt has closed it.
    is_always_open: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.start_marker = cls.start_markers[0]
        cls.end_marker = cls.end_markers[0]
        cls.thinking_ends = (*cls.end_markers, *cls.call_markers)
        cls.marker_before_calls = cls.end_marker
        cls.may_call_while_thinking = bool(cls.call_markers)
        cls.markers = (*cls.start_markers, *cls.end_markers, *cls.call_markers)

    def __init__(self, prompt: str, *, continued: str = "", hides_markers: bool = False) -> None:
        super().__init__(prompt, continued=continued, hides_markers=hides_markers)
        self._at = _At.CONTENT if self.thinking is Thinking.OFF else _At.BEGINNING

    @classmethod
    def find_thinking(cls, prompt: str, continued: str) -> Thinking:
        if continued:
            last_start = max(continued.rfind(marker) for marker in cls.start_markers)
            last_end = max(continued.rfind(marker) for marker in cls.end_markers)
            return Thinking.OPEN if last_start > last_end else Thinking.OFF
        end = prompt.rstrip()
        if end.endswith(cls.end_markers):
            return Thinking.OFF
        if cls.is_always_open or end.endswith(cls.start_markers):
            return Thinking.OPEN
        return Thinking.OPTIONAL

    def feed(self, text: str) -> ReasoningDelta:
        self._pending += text
        delta = ReasoningDelta()
        if self._at is _At.BEGINNING:
            self._begin(is_last=False)
        if self._at is _At.THINKING:
            self._think(delta)
        if self._at is _At.CONTENT:
            self._pass_on(delta)
        return delta

    def flush(self) -> ReasoningDelta:
        delta = ReasoningDelta()
        if self._at is _At.BEGINNING:
            self._begin(is_last=True)
        if self._at is _At.THINKING:
            delta.reasoning += self._take_reasoning(len(self._pending))
        else:
            delta.content += self._take(len(self._pending))
        return delta

    def _begin(self, *, is_last: bool) -> None:
        """Decides whether the output begins with a start marker, once enough of it is there."""
        text = self._pending.lstrip()
        for marker in self.start_markers:
            if text.startswith(marker):
                self._take(len(self._pending) - len(text) + len(marker))
                self._at = _At.THINKING
                return
        if not is_last and any(marker.startswith(text) for marker in self.start_markers):
            return
        self._at = _At.THINKING if self.thinking is Thinking.OPEN else _At.CONTENT

    def _think(self, delta: ReasoningDelta) -> None:
        ends = self.thinking_ends
        hidden = self.start_markers if self.hides_markers else ()
        while (found := find_first(self._pending, (*ends, *hidden))) is not None:
            position, marker = found
            delta.reasoning += self._take_reasoning(position)
            if marker not in self.call_markers:
                self._take(len(marker))
            if marker in ends:
                self._at = _At.CONTENT
                return
        num_held = open_overlap(self._pending, (*ends, *hidden))
        delta.reasoning += self._take_reasoning(len(self._pending) - num_held)

    def _pass_on(self, delta: ReasoningDelta) -> None:
        hidden = (*self.start_markers, *self.end_markers) if self.hides_markers else ()
        while (found := find_first(self._pending, hidden)) is not None:
            position, marker = found
            delta.content += self._take(position)
            self._take(len(marker))
        num_held = open_overlap(self._pending, hidden)
        delta.content += self._take(len(self._pending) - num_held)
