"""Prompt logprobs across preemption: a prompt that is computed again reports them again."""

from __future__ import annotations

from llmserve.core import PromptLogprobs


class PromptLogprobsProgress:
    """Counts, per request, the entries that came and those that were passed on."""

    def __init__(self) -> None:
        self._num_received: dict[str, int] = {}  # since the prompt was last started
        self._num_passed_on: dict[str, int] = {}

    def receive(self, request_id: str, part: PromptLogprobs, *, is_first: bool) -> PromptLogprobs:
        """The entries of `part` that were not passed on before.

        is_first: the chunk that gave it begins the prompt, perhaps once more.
        """
        start = 0 if is_first else self._num_received.get(request_id, 0)
        num_known = self._num_passed_on.get(request_id, 0)
        self._num_received[request_id] = start + len(part)
        self._num_passed_on[request_id] = max(num_known, start + len(part))
        return part[max(0, num_known - start) :]

    def forget(self, request_id: str) -> None:
        self._num_received.pop(request_id, None)
        self._num_passed_on.pop(request_id, None)
