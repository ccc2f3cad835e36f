"""Follows the thinking of one sequence, and ends it when its budget is used up."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from llmserve.core import ThinkingBudget


class _At(enum.Enum):
    BEGINNING = enum.auto()  # it is open whether the output begins to think
    THINKING = enum.auto()
    ENDED = enum.auto()


class ThinkingFollower:
    """Invariant: its state follows from the output alone, so a preempted sequence regains it."""

    def __init__(self, budget: ThinkingBudget, output_token_ids: Iterable[int]) -> None:
        self._budget = budget
        self._at = _At.THINKING if budget.is_open else _At.BEGINNING
        self._tail = b""  # of the output, as much as a marker may still need
        self._num_tokens = 0  # of thinking, the end marker's not counted
        self._num_forced = 0
        self._tail_size = max(map(len, budget.ends)) - 1
        for token_id in output_token_ids:
            self.append(token_id)

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may come next; None if any may."""
        if self._at is not _At.THINKING or self._num_tokens < self._budget.max_tokens:
            return None
        return self._budget.end_token_ids[self._num_forced]

    def append(self, token_id: int) -> None:
        """The output goes on with a token."""
        if self._at is _At.ENDED:
            return
        is_forced = token_id == self.forced_token_id
        self._tail += self._budget.token_bytes(token_id)
        if self._at is _At.BEGINNING:
            self._begin()
            return
        if is_forced:  # to the last token, whichever of them already ends the thinking
            self._num_forced += 1
            if self._num_forced == len(self._budget.end_token_ids):
                self._at = _At.ENDED
        elif any(end in self._tail for end in self._budget.ends):
            self._at = _At.ENDED
        else:
            self._num_tokens += 1
        self._tail = self._tail[max(0, len(self._tail) - self._tail_size) :]

    def _begin(self) -> None:
        text = self._tail.lstrip()
        start = self._budget.start
        if text.startswith(start):
            self._at = _At.THINKING
            self._tail = text[len(start) :]
        elif not start.startswith(text):
            self._at = _At.ENDED
