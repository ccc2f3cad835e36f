"""Token counts of an answer."""

from __future__ import annotations

from typing import Any

from llmserve.core import OutputDelta


class UsageCounter:
    """Sums over prompts and choices. A prompt counts once, whatever n is."""

    def __init__(self, prompt_lengths: list[int]) -> None:
        self._num_prompt_tokens = sum(prompt_lengths)
        self._num_cached_tokens: dict[int, int] = {}  # by position of the prompt
        self._num_output_tokens: dict[tuple[int, int], int] = {}  # by (prompt, choice)
        self.num_reasoning_tokens: dict[int, int] | None = None  # by choice, where it is counted

    def add(self, position: int, delta: OutputDelta) -> None:
        """Takes a delta's running totals."""
        self._num_output_tokens[position, delta.index] = delta.num_output_tokens
        if delta.index == 0:
            self._num_cached_tokens[position] = delta.num_cached_tokens

    def clear_output(self) -> None:
        """Nothing of the output is part of the answer."""
        self._num_output_tokens.clear()

    def as_json(self) -> dict[str, Any]:
        num_output_tokens = sum(self._num_output_tokens.values())
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }
        if self.num_reasoning_tokens is not None:
            num_reasoning_tokens = sum(self.num_reasoning_tokens.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
        return usage
