"""The two threads beside the event loop: one launches steps, one waits for their ends."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from llmserve.core import PendingStep, StepPlan, StepResult


class Executor(Protocol):
    """Where a step runs. One thread calls it, with plans in the order of their scheduling."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step; blocking. The steps before may still run.

        Raises when the step as a whole failed, as PendingStep.wait may do later.
        """
        ...

    def probe(self) -> None:
        """Runs a forward pass of one token that no sequence owns; raises if it fails."""
        ...


class StepSkippedError(Exception):
    """The step was not launched, because one before it failed."""


class StepThreads:
    """Launches steps in the order of submit() and hands their results to the loop.

    After a failed step no other one is launched, until probe() has found that the executor works.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="llmserve-step")
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="llmserve-wait")
        self._has_failed = False  # written by both threads, and read before a launch

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """The step's result, or what it raised."""
        future: Future[StepResult] = Future()
        self._launcher.submit(self._launch, plan, future)
        return asyncio.wrap_future(future)

    async def probe(self) -> None:
        """Raises if the executor cannot run a forward pass any more. No step may be under way."""
        await asyncio.get_running_loop().run_in_executor(self._launcher, self._probe)

    def close(self) -> None:
        """Blocks until the step that runs has ended; those that were not launched never will be."""
        self._launcher.shutdown(cancel_futures=True)
        self._waiter.shutdown()

    def _launch(self, plan: StepPlan, future: Future[StepResult]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._has_failed:
            future.set_exception(StepSkippedError())
            return
        try:
            step = self._executor.launch(plan)
        except Exception as error:
            self._fail(future, error)
            return
        if step.is_done:  # nothing to wait for: spares a change of threads
            self._finish(step, future)
        else:
            self._waiter.submit(self._finish, step, future)

    def _finish(self, step: PendingStep, future: Future[StepResult]) -> None:
        try:
            result = step.wait()
        except Exception as error:
            self._fail(future, error)
        else:
            future.set_result(result)

    def _fail(self, future: Future[StepResult], error: Exception) -> None:
        self._has_failed = True
        future.set_exception(error)

    def _probe(self) -> None:
        self._executor.probe()
        self._has_failed = False
