"""Engine: what to run and what became of it, and from token events to streams.

No asyncio, no threads, no executor: whoever calls schedule() runs the plan and comes back with
update(), fail_step() or discard_step(). Owns one RequestState per request: its choices, and where
its deltas go.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmserve.core import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    Request,
    StepPlan,
    StepResult,
    TokenEvent,
)
from llmserve.engine.outputs import ChoiceState
from llmserve.engine.stats import EngineStats
from llmserve.errors import EngineError, OutputImpossibleError, StepFailedError
from llmserve.scheduler import Scheduler
from llmserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives what a request produces; never blocks."""

    def put(self, delta: OutputDelta) -> None: ...

    def fail(self, error: EngineError) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class RequestState:
    """A request in flight: its unfinished choices by sequence id, and its sink."""

    request_id: str
    sink: Sink
    choices: dict[str, ChoiceState]
    is_logged: bool = True


class Engine:
    """Invariant: a sequence is in `_states` exactly as long as the scheduler knows it."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        stats: EngineStats,
        *,
        log_requests: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._stats = stats
        self._log_requests = log_requests
        self._clock = clock
        self._states: dict[str, RequestState] = {}  # by sequence id
        self._requests: dict[str, RequestState] = {}  # by request id

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def num_unfinished(self) -> int:
        """Requests (not sequences) in flight."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be scheduled before the first of them has ended."""
        return self._scheduler.max_steps_in_flight

    @property
    def num_running(self) -> int:
        """Sequences in the running batch."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be scheduled."""
        return self._scheduler.num_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV cache blocks in use, 0 to 1."""
        return self._scheduler.kv_cache_usage

    def add(self, request: GenerationRequest, sink: Sink, arrival: float) -> None:
        """Queues a request: one sequence per choice. Raises without effect if one is refused."""
        if request.request_id in self._requests:
            raise ValueError(f"there is a request {request.request_id} already")
        try:
            self._add_choices(request, sink, arrival)
        except Exception:
            self.abort(request.request_id)
            raise

    def _add_choices(self, request: GenerationRequest, sink: Sink, arrival: float) -> None:
        state = RequestState(request.request_id, sink, {}, request.is_logged)
        self._requests[request.request_id] = state
        self._stats.request_params_n.observe(request.n)
        self._stats.request_params_max_tokens.observe(request.sampling.max_tokens)
        first_id = request.request_id if request.n == 1 else f"{request.request_id}-0"
        for index in range(request.n):
            sequence_id = first_id if index == 0 else f"{request.request_id}-{index}"
            sampling = request.sampling
            if index > 0:
                # Prompt logprobs are the same for all choices; seeds are not.
                sampling = dataclasses.replace(
                    sampling, seed=sampling.seed + index, num_prompt_logprobs=None
                )
            sequence = Request(
                request_id=sequence_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling,
                arrival_time=arrival,
                priority=request.priority,
                cache_salt=request.cache_salt,
                parent_id=first_id if index > 0 else None,
            )
            state.choices[sequence_id] = ChoiceState.create(index, sequence, self._tokenizer)
            self._states[sequence_id] = state
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request whose client has gone; its stream gets nothing more."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        for sequence_id, choice in state.choices.items():
            self._scheduler.abort(sequence_id)
            del self._states[sequence_id]
            self._record_finish(state, choice, FinishReason.ABORT)
        state.choices.clear()
        state.sink.close()

    def abort_all(self) -> None:
        """Ends what is in flight with finish reason `abort`, as seen by the clients."""
        for request_id in list(self._requests):
            state = self._requests[request_id]
            for choice in state.choices.values():
                state.sink.put(choice.end(FinishReason.ABORT))
            self.abort(request_id)

    def fail_all(self, error: EngineError) -> None:
        """The engine is dead: every open stream raises `error`. The scheduler is left alone."""
        for state in self._requests.values():
            state.sink.fail(error)
        self._requests.clear()
        self._states.clear()

    def schedule(self) -> StepPlan:
        """An empty one has nothing to run, at least not before a step in flight has ended."""
        return self._scheduler.schedule()

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Applies a step's results and hands deltas to the sinks."""
        self._stats.iteration_tokens.observe(plan.total_num_scheduled_tokens)
        now = self._clock()
        for event in self._scheduler.update(plan, result):
            self._deliver(event, now)
        self._publish_counters()

    def fail_step(self, plan: StepPlan, error: Exception) -> None:
        """The forward pass raised: the requests of this step end with an error, no others."""
        message = f"the forward pass failed: {type(error).__name__}"
        now = self._clock()
        for event in self._scheduler.fail_step(plan, message):
            self._deliver(event, now)

    def retry_step(self, plan: StepPlan) -> bool:
        """The step lacked memory: its requests compute it again in smaller steps.

        False, and nothing has changed, if they did so before.
        """
        return self._scheduler.retry_step(plan)

    def discard_step(self, plan: StepPlan) -> None:
        """A step before this one failed: its requests compute again what it may have given."""
        self._scheduler.discard_step(plan)

    def _deliver(self, event: TokenEvent, now: float) -> None:
        sequence_id = event.request_id
        state = self._states.get(sequence_id)
        if state is None:
            return  # aborted while the step ran
        if event.finish_reason is FinishReason.ERROR:
            message = event.error or "the request failed"
            kind = OutputImpossibleError if event.is_callers_fault else StepFailedError
            self._fail_request(state, kind(message))
            return
        choice = state.choices[sequence_id]
        self._record_tokens(choice, event, now)
        delta = choice.process(event)
        if delta.finish_reason is not None and event.finish_reason is None:
            self._scheduler.finish(sequence_id, delta.finish_reason, delta.stop_reason)
        if delta.token_ids or delta.finish_reason is not None:
            state.sink.put(delta)
        if delta.finish_reason is not None:
            self._finish_choice(state, sequence_id, delta.finish_reason)

    def _finish_choice(self, state: RequestState, sequence_id: str, reason: FinishReason) -> None:
        choice = state.choices.pop(sequence_id)
        del self._states[sequence_id]
        self._record_finish(state, choice, reason)
        if not state.choices:
            del self._requests[state.request_id]
            state.sink.close()

    def _fail_request(self, state: RequestState, error: EngineError) -> None:
        """One failed choice fails the request; its siblings end with it."""
        del self._requests[state.request_id]
        for sequence_id, choice in state.choices.items():
            self._scheduler.abort(sequence_id)
            del self._states[sequence_id]
            self._record_finish(state, choice, FinishReason.ERROR)
        state.choices.clear()
        state.sink.fail(error)

    def _record_tokens(self, choice: ChoiceState, event: TokenEvent, now: float) -> None:
        timing, stats = choice.timing, self._stats
        if not event.token_ids:
            return
        if timing.last_token is None:
            timing.first_token = now
            stats.time_to_first_token.observe(now - choice.request.arrival_time)
            if choice.index == 0:
                stats.prompt_tokens.inc(choice.request.num_prompt_tokens)
                stats.prompt_tokens_cached.inc(choice.request.num_cached_tokens)
        else:
            stats.inter_token_latency.observe(now - timing.last_token)
        timing.last_token = now
        stats.generation_tokens.inc(len(event.token_ids))

    def _record_finish(
        self, state: RequestState, choice: ChoiceState, reason: FinishReason
    ) -> None:
        stats, timing, request = self._stats, choice.timing, choice.request
        stats.request_success[reason].inc()
        end = timing.last_token or self._clock()
        scheduled = request.first_scheduled_time or end
        queued = scheduled - request.arrival_time
        stats.e2e_latency.observe(end - request.arrival_time)
        stats.queue_time.observe(queued)
        stats.request_prompt_tokens.observe(request.num_prompt_tokens)
        stats.request_generation_tokens.observe(choice.num_output_tokens)
        ttft = tpot = None
        if timing.first_token is not None:
            ttft = timing.first_token - request.arrival_time
            stats.prefill_time.observe(timing.first_token - scheduled)
            stats.decode_time.observe(end - timing.first_token)
            stats.inference_time.observe(end - scheduled)
            if choice.num_output_tokens > 1:
                tpot = (end - timing.first_token) / (choice.num_output_tokens - 1)
                stats.time_per_output_token.observe(tpot)
        if self._log_requests and state.is_logged:
            logger.info(
                "finished %s: reason %s, prompt %d tokens (%d cached), output %d tokens, "
                "queued %.3f s, TTFT %s, TPOT %s",
                request.request_id,
                reason.value,
                request.num_prompt_tokens,
                request.num_cached_tokens,
                choice.num_output_tokens,
                queued,
                "-" if ttft is None else f"{ttft:.3f} s",
                "-" if tpot is None else f"{tpot * 1e3:.1f} ms",
            )

    def _publish_counters(self) -> None:
        """Moves what the scheduler counted since the last step into the metrics."""
        counts = self._scheduler.take_counts()
        if counts.preemptions:
            self._stats.num_preemptions.inc(counts.preemptions)
        if counts.prefix_cache_queries:
            self._stats.prefix_cache_queries.inc(counts.prefix_cache_queries)
            self._stats.prefix_cache_hits.inc(counts.prefix_cache_hits)
