"""How long work kept the event loop, or another thread, from running.

Pauses are in CPU seconds of this process, threads together: what other processes take from it does
not count. Limits of some milliseconds follow the machine (see `scaled`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable

import orjson

_NUM_NUMBERS = 300_000
_READING_S = 0.002


class Heartbeat:
    """The longest pause between two turns of the running loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            begin = time.process_time()
            try:
                await asyncio.sleep(0.001)
            finally:  # also of the turn in which the work's end cancels the task
                self.longest_s = max(self.longest_s, time.process_time() - begin)


def pauses_during(work: Callable[[], object]) -> list[float]:
    """The pauses of this thread, which sleeps 0.5 ms at a time, while another does `work`."""
    thread = threading.Thread(target=work)
    pauses = []
    last = time.process_time()
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        now = time.process_time()
        pauses.append(now - last)
        last = now
    thread.join()
    return pauses


@functools.cache
def scaled(limit_s: float) -> float:
    """A limit that holds where orjson reads 300,000 numbers in 2 ms, longer on slower machines."""
    text = orjson.dumps([97] * _NUM_NUMBERS)
    times = []
    for _ in range(20):
        begin = time.thread_time()
        orjson.loads(text)
        times.append(time.thread_time() - begin)
    return limit_s * max(1.0, min(times) / _READING_S)
