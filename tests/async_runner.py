"""A FakeRunner behind a queue, as a GPU is: launch() returns at once, and a thread computes.

Results arrive late, in order, and may be waited for from several threads. What the host knows of a
sequence's output is what it has waited for, and launch() checks that it suffices.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from llmserve.core import PendingStep, StepPlan, StepResult
from tests.fake_runner import FakeRunner


class LateStep:
    """Implements llmserve.core.PendingStep. The first result that is asked for comes `delay_s`
    after the step's end."""

    def __init__(self, number: int, future: Future[StepResult], delay_s: float) -> None:
        self.number = number
        self.was_waited_for = threading.Event()
        self._future = future
        self._delay_s = delay_s

    @property
    def is_done(self) -> bool:
        return self.was_waited_for.is_set()

    def wait(self) -> StepResult:
        result = self._future.result()
        time.sleep(self._delay_s)
        self.was_waited_for.set()
        return result


class AsyncRunner:
    """Implements llmserve.executor.uniproc.Runner.

    delays_s: how long launches, steps and results take, over and over. fails_at_launch: numbers of
    steps, from 0, whose launch raises before anything of them was done.
    """

    def __init__(
        self,
        inner: FakeRunner,
        delays_s: Iterable[float] = (0.0,),
        fails_at_launch: Iterable[int] = (),
    ) -> None:
        self.inner = inner
        self.launched: list[StepPlan] = []
        self.may_compute = threading.Event()
        self.may_compute.set()
        self._delays_s = itertools.cycle(delays_s)
        self._fails_at_launch = frozenset(fails_at_launch)
        self._stream = ThreadPoolExecutor(1)
        self._last: LateStep | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        number = len(self.launched)
        self.launched.append(plan)
        time.sleep(next(self._delays_s))
        if number in self._fails_at_launch:
            raise RuntimeError("injected failure at launch")
        if plan.needs_last_result and self._last is not None:
            assert self._last.was_waited_for.is_set(), "the host does not know the last tokens"
        future = self._stream.submit(self._compute, plan, next(self._delays_s))
        self._last = LateStep(number, future, next(self._delays_s))
        return self._last

    def probe(self) -> None:
        self._last = None
        self._stream.submit(self.inner.probe).result()

    def close(self) -> None:
        self._stream.shutdown()

    def _compute(self, plan: StepPlan, delay_s: float) -> StepResult:
        assert self.may_compute.wait(30)
        time.sleep(delay_s)
        return self.inner.execute(plan)
