"""The interface of reasoning parsers: from the text of a model to reasoning and content."""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass
from typing import ClassVar


class Thinking(enum.Enum):
    """What the prompt's end says about thinking in the output."""

    OPEN = "open"  # the output begins within the thinking
    OPTIONAL = "optional"  # the model begins to think, or not
    OFF = "off"  # the output is content


@dataclass(slots=True)
class ReasoningDelta:
    """What a piece of text added. Reasoning comes before content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(abc.ABC):
    """Splits one choice's text as it arrives. The result depends on the whole text alone, never
    on how it was cut into pieces.

    Invariants: the reasoning is the text at `segments`, which grow with it; all before `decided`
    has been classified. Both count characters of the text that was fed.
    """

    # Text that begins and that ends the thinking.
    start_marker: ClassVar[str]
    end_marker: ClassVar[str]
    # All texts that end it.
    thinking_ends: ClassVar[tuple[str, ...]]
    # Text behind which tool calls may begin when they must come.
    marker_before_calls: ClassVar[str]
    # Tool calls may begin within the thinking, and end it.
    may_call_while_thinking: ClassVar[bool]
    # Everything that the parser looks for, which may be special tokens of the vocabulary.
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, prompt: str, *, continued: str = "", hides_markers: bool = False) -> None:
        """`prompt`: the rendered conversation; `continued`: the text of a last message that the
        output goes on with. `hides_markers`: a marker in the content is left out of it (the
        vocabulary has it as a special token, and those are not shown)."""
        self.thinking = self.find_thinking(prompt, continued)
        self.hides_markers = hides_markers
        self.segments: list[tuple[int, int]] = []
        self.decided = 0
        self._pending = ""  # fed, not classified yet

    @classmethod
    @abc.abstractmethod
    def find_thinking(cls, prompt: str, continued: str) -> Thinking:
        """Whether the output may think, from where it begins."""

    @abc.abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Adds text; returns what it decided."""

    @abc.abstractmethod
    def flush(self) -> ReasoningDelta:
        """The text has ended; returns what was held back."""

    def _take(self, size: int) -> str:
        """The next `size` characters, classified as neither."""
        taken, self._pending = self._pending[:size], self._pending[size:]
        self.decided += len(taken)
        return taken

    def _take_reasoning(self, size: int) -> str:
        begin = self.decided
        taken = self._take(size)
        if taken and self.segments and self.segments[-1][1] == begin:
            self.segments[-1] = (self.segments[-1][0], self.decided)
        elif taken:
            self.segments.append((begin, self.decided))
        return taken
