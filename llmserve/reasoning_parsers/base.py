"""The interface of reasoning parsers: from the text of a model to reasoning and content."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True)
class ReasoningDelta:
    """What a piece of text added. Reasoning comes before content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(abc.ABC):
    """Splits one choice's text as it arrives. The result depends on the whole text alone, never
    on how it was cut into pieces."""

    # Text that ends the thinking; "" where no fixed text does.
    end_marker: ClassVar[str] = ""
    # The markers are special tokens, which must not be left out of the text.
    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, prompt: str) -> None:
        """`prompt`: the rendered conversation, whose end tells if thinking is open, closed, or up
        to the model."""
        self.prompt = prompt

    @property
    @abc.abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the next text may still be reasoning (before the first text: whether the model
        may think at all)."""

    @abc.abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Adds text; returns what it decided."""

    @abc.abstractmethod
    def flush(self) -> ReasoningDelta:
        """The text has ended; returns what was held back."""
