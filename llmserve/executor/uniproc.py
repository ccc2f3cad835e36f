"""Runs steps in this process, in the thread that calls."""

from __future__ import annotations

from llmserve.core import StepPlan, StepResult
from llmserve.runner import ModelRunner


class UniprocExecutor:
    """One runner. Not for calls from several threads at once."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """Blocking. Raises what ModelRunner.execute raises."""
        return self._runner.execute(plan)

    def probe(self) -> None:
        """Blocking. Raises if the runner cannot compute a forward pass."""
        self._runner.probe()
