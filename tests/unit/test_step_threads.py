"""Steps go through two threads, in order, and none is launched behind a failed one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from llmserve.core import FinishedStep, PendingStep, SeqResult, StepPlan, StepResult
from llmserve.engine.step_threads import StepSkippedError, StepThreads


class Step:
    """Ends when it may."""

    is_done = False

    def __init__(self, result: StepResult, error: Exception | None) -> None:
        self.may_end = threading.Event()
        self.waited_in: list[str] = []
        self._result = result
        self._error = error

    def wait(self) -> StepResult:
        self.waited_in.append(threading.current_thread().name)
        assert self.may_end.wait(10)
        if self._error is not None:
            raise self._error
        return self._result


class ListExecutor:
    """Launches are noted; `errors` and `late` tell by number what becomes of them."""

    def __init__(self) -> None:
        self.launched: list[StepPlan] = []
        self.errors: dict[int, Exception] = {}
        self.late: dict[int, Step] = {}
        self.may_launch = threading.Event()
        self.may_launch.set()
        self.probe_error: Exception | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        assert self.may_launch.wait(10)
        number = len(self.launched)
        self.launched.append(plan)
        if number in self.errors:
            raise self.errors[number]
        return self.late.get(number) or FinishedStep(result_of(plan))

    def probe(self) -> None:
        if self.probe_error is not None:
            raise self.probe_error


def plan_of(number: int) -> StepPlan:
    return StepPlan([str(number)], [0], [1], [True])


def result_of(plan: StepPlan) -> StepResult:
    return StepResult([SeqResult((int(plan.request_ids[0]),))])


@pytest.fixture
def executor() -> ListExecutor:
    return ListExecutor()


@pytest.fixture
async def threads(executor: ListExecutor) -> AsyncIterator[StepThreads]:
    threads = StepThreads(executor)
    yield threads
    threads.close()


async def test_results_come_back_and_launches_keep_their_order(
    executor: ListExecutor, threads: StepThreads
) -> None:
    futures = [threads.submit(plan_of(number)) for number in range(20)]

    results = [await future for future in futures]

    assert [result.sequences[0].token_ids for result in results] == [(n,) for n in range(20)]
    assert executor.launched == [plan_of(number) for number in range(20)]


async def test_a_step_is_launched_while_another_one_runs(
    executor: ListExecutor, threads: StepThreads
) -> None:
    step = executor.late[0] = Step(result_of(plan_of(0)), None)
    first, second = threads.submit(plan_of(0)), threads.submit(plan_of(1))

    assert (await second).sequences[0].token_ids == (1,)
    assert not first.done()
    step.may_end.set()
    assert (await first).sequences[0].token_ids == (0,)
    assert [name.rstrip("_0") for name in step.waited_in] == ["llmserve-wait"]


async def test_nothing_is_launched_behind_a_failed_launch_until_a_probe(
    executor: ListExecutor, threads: StepThreads
) -> None:
    executor.errors[0] = RuntimeError("kernel exploded")
    executor.may_launch.clear()
    futures = [threads.submit(plan_of(number)) for number in range(3)]
    executor.may_launch.set()

    with pytest.raises(RuntimeError, match="exploded"):
        await futures[0]
    for future in futures[1:]:
        with pytest.raises(StepSkippedError):
            await future
    assert executor.launched == [plan_of(0)]
    await threads.probe()
    assert (await threads.submit(plan_of(3))).sequences[0].token_ids == (3,)


async def test_nothing_is_launched_behind_a_step_that_failed_late(
    executor: ListExecutor, threads: StepThreads
) -> None:
    step = executor.late[0] = Step(StepResult(), RuntimeError("late"))
    first = threads.submit(plan_of(0))
    step.may_end.set()
    with pytest.raises(RuntimeError, match="late"):
        await first

    with pytest.raises(StepSkippedError):
        await threads.submit(plan_of(1))


async def test_a_failed_probe_raises_and_launches_nothing(
    executor: ListExecutor, threads: StepThreads
) -> None:
    executor.errors[0] = RuntimeError("kernel exploded")
    executor.probe_error = RuntimeError("still broken")
    with pytest.raises(RuntimeError, match="exploded"):
        await threads.submit(plan_of(0))

    with pytest.raises(RuntimeError, match="still broken"):
        await threads.probe()
    with pytest.raises(StepSkippedError):
        await threads.submit(plan_of(1))


async def test_a_cancelled_step_is_not_launched(
    executor: ListExecutor, threads: StepThreads
) -> None:
    executor.may_launch.clear()
    first, second = threads.submit(plan_of(0)), threads.submit(plan_of(1))

    second.cancel()
    await asyncio.sleep(0)  # the thread's future hears of it
    executor.may_launch.set()

    await first
    assert (await threads.submit(plan_of(2))).sequences[0].token_ids == (2,)
    assert executor.launched == [plan_of(0), plan_of(2)]


async def test_close_waits_for_the_step_that_runs(executor: ListExecutor) -> None:
    threads = StepThreads(executor)
    step = executor.late[0] = Step(StepResult(), None)
    threads.submit(plan_of(0))
    for _ in range(1000):
        if step.waited_in:
            break
        await asyncio.sleep(0.005)
    threading.Timer(0.05, step.may_end.set).start()

    threads.close()

    assert step.may_end.is_set()
