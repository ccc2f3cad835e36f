"""Where work on large inputs runs: a few threads of its own, so that it never takes all of them.

Tokenizing 64 MiB of text takes seconds of CPU and much memory. Any number of such requests may
wait; only a few run at once, and the threads of small work stay free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LARGE_BYTES = 1 << 18  # about 0.1 s of tokenizing
_NUM_THREADS = 2


class WorkGate:
    """Owns its threads, which begin with the first large work."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="large-work")

    async def run(
        self, size: int, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs `work` on an input of `size` bytes in a thread, large work when it is its turn.

        If the caller is cancelled, work that has not begun is dropped; work that has begun goes on
        in its thread, so it should look at a flag that the caller sets.
        """
        if size <= _LARGE_BYTES:
            return await asyncio.to_thread(work, *args, **kwargs)
        future = self._pool.submit(work, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops what waits; does not wait for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
