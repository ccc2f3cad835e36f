"""CompileThreads: a job that never ends costs others nothing but a short wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from llmserve.grammar.compile_threads import BusyError, CompileThreads, Job, OverrunError

TIMEOUT_S = 0.3


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def start_overruns(
    threads: CompileThreads, count: int, release: threading.Event
) -> list[Job[bool]]:
    jobs = [threads.submit(lambda: release.wait(30)) for _ in range(count)]
    for job in jobs:
        with pytest.raises(OverrunError):
            threads.wait(job)
    return jobs


def test_result_is_given_to_who_waits() -> None:
    threads = CompileThreads(1, 1, TIMEOUT_S)

    assert [threads.wait(threads.submit(lambda: 7)) for _ in range(3)] == [7, 7, 7]
    threads.close()


def test_error_of_a_job_is_raised_to_who_waits_and_the_thread_goes_on() -> None:
    threads = CompileThreads(1, 1, TIMEOUT_S)

    with pytest.raises(ZeroDivisionError):
        threads.wait(threads.submit(lambda: 1 // 0))
    assert threads.wait(threads.submit(lambda: 5)) == 5
    threads.close()


def test_job_that_overruns_gives_its_place_to_another_thread(release: threading.Event) -> None:
    threads = CompileThreads(2, 3, TIMEOUT_S)
    start_overruns(threads, 2, release)

    assert threads.wait(threads.submit(lambda: "done")) == "done"
    threads.close()


def test_job_that_is_known_to_overrun_is_not_waited_for_again(release: threading.Event) -> None:
    threads = CompileThreads(1, 1, TIMEOUT_S)
    (job,) = start_overruns(threads, 1, release)

    begin = time.monotonic()
    with pytest.raises(OverrunError):
        threads.wait(job)

    assert time.monotonic() - begin < TIMEOUT_S / 2
    threads.close()


def test_nothing_is_begun_while_too_many_jobs_overrun(release: threading.Event) -> None:
    threads = CompileThreads(1, 2, TIMEOUT_S)
    jobs = [start_overruns(threads, 1, release)[0] for _ in range(2)]

    with pytest.raises(BusyError):
        threads.submit(lambda: 1)
    release.set()
    assert all(job.future.result(5) for job in jobs)

    assert threads.wait(threads.submit(lambda: 1)) == 1
    threads.close()


def test_job_whose_turn_does_not_come_is_told_apart_from_one_that_overruns(
    release: threading.Event,
) -> None:
    threads = CompileThreads(1, 1, TIMEOUT_S)
    threads.submit(lambda: release.wait(30))

    with pytest.raises(BusyError):
        threads.wait(threads.submit(lambda: 1))
    threads.close()
