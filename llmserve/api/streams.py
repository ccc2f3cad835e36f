"""The engine's streams of one HTTP request: one per prompt, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from llmserve.core import GenerationRequest, OutputDelta
from llmserve.engine import AsyncEngine, RequestStream

# What arrived since the last read: (position of the prompt, delta).
Batch = list[tuple[int, OutputDelta]]


class Streams:
    """Starts all requests or none. The owner calls `abort` in a `finally`."""

    def __init__(self, engine: AsyncEngine, requests: Sequence[GenerationRequest]) -> None:
        self._streams: list[RequestStream] = []
        try:
            for request in requests:
                self._streams.append(engine.generate(request))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Frees what has not finished; idempotent."""
        for stream in self._streams:
            stream.abort()

    async def batches(self) -> AsyncIterator[Batch]:
        """Until every choice has finished. Raises the EngineError of the first that failed."""
        if len(self._streams) == 1:
            stream = self._streams[0]
            async for delta in stream:
                yield [(0, delta), *((0, later) for later in stream.take_ready())]
            return
        async for batch in self._merged():
            yield batch

    async def _merged(self) -> AsyncIterator[Batch]:
        arrived: list[tuple[int, OutputDelta]] = []
        wake = asyncio.Event()

        async def pump(position: int, stream: RequestStream) -> None:
            async for delta in stream:
                arrived.append((position, delta))
                wake.set()

        tasks = [asyncio.create_task(pump(*item)) for item in enumerate(self._streams)]
        for task in tasks:
            task.add_done_callback(lambda _: wake.set())
        try:
            while True:
                is_over = all(task.done() for task in tasks)
                if arrived:
                    batch, arrived[:] = list(arrived), []
                    yield batch
                for task in tasks:
                    if task.done():
                        task.result()
                if is_over:
                    return
                await wake.wait()
                wake.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
