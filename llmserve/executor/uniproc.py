"""Runs steps in this process, in the thread that calls."""

from __future__ import annotations

from typing import Protocol

from llmserve.core import PendingStep, StepPlan


class Runner(Protocol):
    """Executes step plans in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step; returns when it is handed to the device, or has run.

        Steps before may still run, but the last one has ended where the plan needs its result.
        Sampled tokens become inputs of the next step without a word from above.
        """
        ...

    def probe(self) -> None: ...


class UniprocExecutor:
    """One runner. Not for calls from several threads at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: PendingStep | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        """Blocking. Raises what the runner raises, or, for a plan that needs it, the last step."""
        if plan.needs_last_result and self._last is not None:
            self._last.wait()
        self._last = None
        self._last = self._runner.launch(plan)
        return self._last

    def probe(self) -> None:
        """Blocking. Raises if the runner cannot compute a forward pass."""
        self._runner.probe()
