"""What the sampler needs of a compiled grammar. Made by `llmserve.grammar`, opaque elsewhere."""

from __future__ import annotations

from typing import Protocol


class GrammarState(Protocol):
    """Where one sequence is in its grammar. One thread at a time."""

    def mask(self) -> bytes:
        """Which tokens may come next.

        32-bit little-endian words, ceil(vocab_size / 32) of them; bit i % 32 of word i // 32
        stands for token i. Includes end-of-sequence tokens where the grammar may end.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The sequence goes on with `token_id`. Raises ValueError if the grammar forbids it."""
        ...


class Grammar(Protocol):
    """Compiled once, shared by any number of sequences; immutable."""

    def start(self) -> GrammarState:
        """The state before the first output token."""
        ...
