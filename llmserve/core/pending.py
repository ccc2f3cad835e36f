"""A step that was launched: runner -> executor -> engine."""

from __future__ import annotations

from typing import Protocol

from llmserve.core.outputs import StepResult


class PendingStep(Protocol):
    """A step that may still run. Its methods may be called from any thread, more than once."""

    @property
    def is_done(self) -> bool:
        """Whether wait() would return or raise at once. Never blocks."""
        ...

    def wait(self) -> StepResult:
        """Blocks until the step has ended, without the GIL. Raises if the step has failed."""
        ...


class FinishedStep:
    """A step that has run while it was launched."""

    is_done = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result
