"""AsyncEngine: the coroutine around Engine.

One event loop, and the threads of StepThreads. `schedule` and `update` run on the loop, the steps
beside it; with asynchronous scheduling the next step is launched before the one that runs has
ended. While steps are in flight, handlers only append to two inboxes (new requests, aborts), which
the loop drains before it schedules again; so there are no locks. Nothing here waits for a consumer:
deltas are put into a stream's own queue, whose length max_tokens bounds.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import logging
import time

from llmserve.core import BeamParams, GenerationRequest, OutputDelta, StepPlan, StepResult
from llmserve.engine.beams import search_beams
from llmserve.engine.engine import Engine
from llmserve.engine.stats import EngineStats
from llmserve.engine.step_threads import Executor, StepThreads
from llmserve.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    StepOutOfMemoryError,
)

logger = logging.getLogger(__name__)

# Beam searches that run at once. More would take each other's blocks of the prefix cache away,
# on which their speed rests.
_MAX_BEAM_SEARCHES = 16


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"


class RequestStream:
    """Deltas of one request, choices interleaved; ends when every choice has finished.

    One consumer. Iterating raises StepFailedError or EngineDeadError if the request failed.
    """

    def __init__(self, request_id: str, engine: AsyncEngine) -> None:
        self.request_id = request_id
        self._engine = engine
        self._deltas: collections.deque[OutputDelta] = collections.deque()
        self._error: EngineError | None = None
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._deltas.popleft()

    def take_ready(self) -> list[OutputDelta]:
        """Deltas that have arrived and were not read yet, without waiting."""
        ready = list(self._deltas)
        self._deltas.clear()
        return ready

    def abort(self) -> None:
        """The consumer is gone. Frees the request's blocks within one step; idempotent."""
        if not self._is_closed:
            self.close()
            self._engine._abort(self.request_id)

    # The engine's side.

    def put(self, delta: OutputDelta) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Runs Engine steps for as long as there is work; sleeps on an event when there is none."""

    def __init__(
        self, engine: Engine, executor: Executor, stats: EngineStats, *, max_model_len: int
    ) -> None:
        self.stats = stats
        self.max_model_len = max_model_len
        self.state = EngineState.STARTING
        self._engine = engine
        self._threads = StepThreads(executor)
        # Steps in flight, oldest first.
        self._steps: collections.deque[tuple[StepPlan, asyncio.Future[StepResult]]]
        self._steps = collections.deque()
        self._new: list[tuple[GenerationRequest, RequestStream, float]] = []
        self._aborted: list[str] = []
        self._beam_searches: dict[str, asyncio.Task[None]] = {}  # by request id
        self._beam_slots = asyncio.Semaphore(_MAX_BEAM_SEARCHES)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        stats.watch(
            num_running=lambda: engine.num_running,
            num_waiting=lambda: engine.num_waiting + sum(request.n for request, _, _ in self._new),
            kv_cache_usage=lambda: engine.kv_cache_usage,
        )

    @property
    def num_unfinished(self) -> int:
        """Requests in flight, the ones not yet handed to the scheduler included."""
        return self._engine.num_unfinished + len(self._new)

    async def start(self) -> None:
        """Starts stepping. Call once, on the loop that will serve."""
        self._task = asyncio.create_task(self._run(), name="llmserve-engine")
        self.state = EngineState.READY

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Queues a request and returns its stream at once.

        Raises EngineDrainingError, EngineDeadError, or ContextLengthError for a prompt that
        leaves no room for one token.
        """
        self._refuse_if_dead()
        if self.state is not EngineState.READY:
            raise EngineDrainingError("the server is shutting down")
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output in "
                f"the context of {self.max_model_len} tokens",
                param="prompt",
            )
        if request.beam is not None:
            return self._start_beams(request, request.beam)
        return self._queue(request)

    def _refuse_if_dead(self) -> None:
        if self.state is EngineState.DEAD:
            raise EngineDeadError("the engine has stopped after an error; restart the server")

    def _queue(self, request: GenerationRequest) -> RequestStream:
        self._refuse_if_dead()
        stream = RequestStream(request.request_id, self)
        self._new.append((request, stream, time.monotonic()))
        self._idle.clear()
        self._wake.set()
        return stream

    def _start_beams(self, request: GenerationRequest, beam: BeamParams) -> RequestStream:
        stream = RequestStream(request.request_id, self)
        task = asyncio.create_task(self._run_beams(request, beam, stream))
        self._beam_searches[request.request_id] = task
        task.add_done_callback(lambda _: self._end_beams(request.request_id))
        self._idle.clear()
        return stream

    def _end_beams(self, request_id: str) -> None:
        del self._beam_searches[request_id]
        self._wake.set()

    async def _run_beams(
        self, request: GenerationRequest, beam: BeamParams, stream: RequestStream
    ) -> None:
        """A search that began goes on while the engine drains: its steps are not new requests."""
        try:
            async with self._beam_slots:
                deltas = await search_beams(request, beam, self._queue, self._engine.tokenizer)
            for delta in deltas:
                stream.put(delta)
            stream.close()
        except EngineError as error:
            stream.fail(error)
        except Exception:
            logger.exception("the beam search of request %s failed", request.request_id)
            stream.fail(EngineError("the beam search failed"))

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets running ones finish until the deadline, aborts the rest."""
        if self.state is EngineState.DEAD:
            return
        self.state = EngineState.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            logger.warning("aborting %d requests at the shutdown deadline", self.num_unfinished)
            self._drain_inboxes()
            self._engine.abort_all()
            self._wake.set()

    async def shutdown(self) -> None:
        """Stops stepping and joins the threads. Open streams raise EngineDeadError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, future in self._steps:
            future.cancel()
        self._die("the server has shut down")
        await asyncio.get_running_loop().run_in_executor(None, self._threads.close)

    def _abort(self, request_id: str) -> None:
        search = self._beam_searches.get(request_id)
        if search is not None:
            search.cancel()
            return
        self._aborted.append(request_id)
        self._wake.set()

    def _drain_inboxes(self) -> None:
        new, self._new = self._new, []
        for request, stream, arrival in new:
            try:
                self._engine.add(request, stream, arrival)
            except Exception:
                logger.exception("request %s could not be queued", request.request_id)
                stream.fail(EngineError("the request could not be queued"))
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            self._engine.abort(request_id)

    async def _run(self) -> None:
        try:
            while True:
                self._drain_inboxes()
                if not self._engine.num_unfinished and not self._beam_searches:
                    self._idle.set()
                self._launch_steps()
                if self._steps:
                    await self._end_step()
                elif self._engine.has_work:
                    await asyncio.sleep(0)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("the engine has stopped after an error")
            self._die("the engine has stopped after an error; restart the server")

    def _launch_steps(self) -> None:
        """Keeps as many steps in flight as there may be and have something to compute."""
        while len(self._steps) < self._engine.max_steps_in_flight and self._engine.has_work:
            plan = self._engine.schedule()
            if plan.is_empty:
                return
            self._steps.append((plan, self._threads.submit(plan)))

    async def _end_step(self) -> None:
        """Waits for the oldest step in flight and applies what it gave."""
        plan, future = self._steps.popleft()
        try:
            result = await future
        except Exception as error:
            await self._recover(plan, error)
        else:
            self._engine.update(plan, result)

    async def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Fails the step's requests, but where memory ran out for the first time, when they compute
        it again in smaller steps. Goes on only if a forward pass still works."""
        is_short = isinstance(error, StepOutOfMemoryError)
        if is_short and self._engine.retry_step(plan):
            logger.warning("a step ran out of memory and begins anew in smaller ones: %s", error)
        else:
            logger.error("a step of %d requests failed", len(plan.request_ids), exc_info=error)
            self._engine.fail_step(plan, error)
        while self._steps:
            later, future = self._steps.popleft()
            await asyncio.wait([future])
            future.exception()  # whatever it is, it follows from the first one
            self._engine.discard_step(later)
        await self._threads.probe()

    def _die(self, message: str) -> None:
        self.state = EngineState.DEAD
        error = EngineDeadError(message)
        for _, stream, _ in self._new:
            stream.fail(error)
        self._new.clear()
        self._engine.fail_all(error)
        self._idle.set()
