"""Threads that compile grammars. A compilation cannot be stopped: one that takes too long keeps its
thread, and another thread takes its place, up to a number of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BusyError(Exception):
    """No thread is free for this; later one may be."""


class OverrunError(Exception):
    """The job has taken longer than it may."""


class Job(Generic[Result]):
    """One compilation. `overran` is set once, by whoever waits for it in vain."""

    def __init__(self, build: Callable[[], Result]) -> None:
        self.build = build
        self.future: Future[Result] = Future()
        self.started = threading.Event()
        self.started_at = 0.0
        self.overran = False


class CompileThreads:
    """`num_threads` threads that start with the first jobs and do not keep the process alive.

    Invariant: at most `num_threads` + `max_overruns` threads run; those of jobs that overran end
    with their jobs.
    """

    def __init__(self, num_threads: int, max_overruns: int, timeout_s: float) -> None:
        """`max_overruns` is at least 1: with as many, no job is begun.

        timeout_s: longest wait for a thread, and longest run of a job."""
        self._num_threads = num_threads
        self._max_overruns = max_overruns
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_live = 0  # threads that take jobs
        self._num_overruns = 0
        self._is_closed = False

    def submit(self, build: Callable[[], Result]) -> Job[Result]:
        """Raises BusyError."""
        with self._lock:
            if self._is_closed or self._num_overruns >= self._max_overruns:
                raise BusyError
            if self._num_live < self._num_threads:
                self._add_thread()
        job = Job(build)
        self._queue.put(job)  # type: ignore[arg-type]  # nothing is put into its result here
        return job

    def wait(self, job: Job[Result]) -> Result:
        """Blocks. Raises BusyError, OverrunError, and what the job raised."""
        if job.overran:
            raise OverrunError
        if not job.started.wait(self._timeout_s):
            raise BusyError
        try:
            left_s = job.started_at + self._timeout_s - time.monotonic()
            return job.future.result(max(left_s, 0.0))
        except TimeoutError:
            self._give_up(job)
            raise OverrunError from None

    def close(self) -> None:
        """Ends the threads as soon as they are done with what they compile."""
        with self._lock:
            self._is_closed = True
            num_live = self._num_live
        for _ in range(num_live):
            self._queue.put(None)

    def _give_up(self, job: Job[Result]) -> None:
        with self._lock:
            if job.overran or job.future.done():
                return
            job.overran = True
            self._num_live -= 1
            self._num_overruns += 1
            if self._num_overruns <= self._max_overruns and not self._is_closed:
                self._add_thread()

    def _add_thread(self) -> None:
        self._num_live += 1
        threading.Thread(target=self._run, name="llmserve-grammar", daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None or self._is_closed:
                return
            job.started_at = time.monotonic()
            job.started.set()
            result, error = None, None
            try:
                result = job.build()
            except BaseException as raised:
                error = raised
            self._finish(job, result, error)
            if job.overran:
                return

    def _finish(self, job: Job[object], result: object, error: BaseException | None) -> None:
        with self._lock:
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
            if job.overran:
                self._num_overruns -= 1
