"""A limit on what a model thinks before it answers, as the sampler needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After `max_tokens` tokens of thinking the tokens `end_token_ids` are forced.

    The thinking lasts from the start of the output (`is_open`), or from `start` where the output
    begins with it, white space aside, up to the first of `ends`. All of them are bytes of text.
    """

    max_tokens: int
    is_open: bool
    start: bytes
    ends: tuple[bytes, ...]
    end_token_ids: tuple[int, ...]
    token_bytes: Callable[[int], bytes]
