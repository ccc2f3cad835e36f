"""Scheduler: which sequences run in a step, with how many tokens; and what a step's result means.

There is no prefill phase and no decode phase (Sarathi-Serve, Agrawal et al. 2024, 2403.02310): in
each step a sequence computes some of the tokens that it has not computed yet. Decoding sequences,
which miss one, come first, so a long prompt never holds them up. When blocks run out, the last
sequence in the policy's order loses its blocks and computes them again later (recomputation as in
PagedAttention, Kwon et al. 2023, 2309.06180).

A step may be scheduled while the one before it runs. Then a decoding sequence's next input is a
token that only the runner will know; should it turn out to be the last one, what the step gives for
that sequence is dropped. Knows token ids only; is the only writer of Request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import (
    FinishReason,
    KVCacheSpec,
    Request,
    RequestStatus,
    SeqResult,
    StepPlan,
    StepResult,
    TokenEvent,
)
from llmserve.errors import ContextLengthError, StartupError
from llmserve.kvcache import KVCacheManager, max_tokens_that_fit
from llmserve.scheduler.planner import StepPlanner
from llmserve.scheduler.policy import KEYS
from llmserve.scheduler.prompt_logprobs import PromptLogprobsProgress
from llmserve.scheduler.sequences import Sequences
from llmserve.scheduler.steps_in_flight import StepInFlight, StepsInFlight
from llmserve.scheduler.stop_rules import find_stop


class SchedulerCounts(NamedTuple):
    """What happened since the last call of Scheduler.take_counts()."""

    preemptions: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens


class Scheduler:
    """A step is schedule() and, once it has run, update(); fail_step() or discard_step() if not.

    Invariants:

    * steps end in the order in which they were scheduled;
    * a sequence's tables cover its `num_computed_tokens`;
    * only running requests hold blocks, and ended ones until the last step with them has ended;
    * the runner knows the running requests, and those that the next plan releases.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_spec: KVCacheSpec,
        *,
        num_blocks: int,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` counts the null block. StartupError if no sequence fits into them."""
        self._block_size = kv_spec.block_size
        max_step_tokens = config.token_budget
        max_chunk = min(config.long_prefill_token_threshold or max_step_tokens, max_step_tokens)
        self.max_steps_in_flight = config.max_steps_in_flight
        self.max_model_len = max_tokens_that_fit(kv_spec, num_blocks, max_chunk, max_model_len)
        if self.max_model_len < 2:
            raise StartupError(
                f"a KV cache of {num_blocks} blocks is too small for any request; "
                "raise --kv-cache-memory-bytes"
            )
        self._manager = KVCacheManager(
            kv_spec,
            num_blocks=num_blocks,
            max_step_tokens=max_chunk,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._sequences = Sequences(KEYS[config.scheduling_policy])
        self._steps = StepsInFlight()
        self._planner = StepPlanner(
            config.max_num_seqs,
            max_step_tokens,
            max_chunk,
            config.prompt_tokens_beside,
            self._manager,
            self._sequences,
            self._steps,
            clock,
        )
        self._prompt_logprobs = PromptLogprobsProgress()
        self._retried: set[str] = set()  # sequences of steps that ran out of memory
        self._counted = SchedulerCounts(0, 0, 0)

    # State, read by others.

    @property
    def num_waiting(self) -> int:
        return self._sequences.num_waiting

    @property
    def num_running(self) -> int:
        return self._sequences.num_running

    @property
    def has_work(self) -> bool:
        """Whether there are sequences that have not ended."""
        return len(self._sequences) > 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV cache blocks in use, 0 to 1."""
        return self._manager.usage

    @property
    def num_preemptions(self) -> int:
        return self._sequences.num_preemptions

    def take_counts(self) -> SchedulerCounts:
        """What was counted since the last call."""
        manager, last = self._manager, self._counted
        now = SchedulerCounts(
            self._sequences.num_preemptions, manager.prefix_cache_queries, manager.prefix_cache_hits
        )
        self._counted = now
        return SchedulerCounts(now[0] - last[0], now[1] - last[1], now[2] - last[2])

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is reused by later requests."""
        self._manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """RuntimeError if block tables and pool contradict one another. For tests."""
        self._manager.check_integrity()

    # Requests come and go. All of these may be called while steps are in flight.

    def add(self, request: Request) -> None:
        """Queues a sequence. ContextLengthError if its prompt and one token can never fit."""
        if self._sequences.get(request.request_id) is not None:
            raise ValueError(f"there is a request {request.request_id} already")
        if request.num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {request.num_prompt_tokens} tokens; with one token of output it "
                f"exceeds the {self.max_model_len} tokens that a request can have here",
                param="prompt",
            )
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len
        )
        parent = self._sequences.get(request.parent_id)
        self._sequences.add(
            request, is_held=parent is not None and not self._steps.have_computed_prompt(parent)
        )

    def abort(self, request_id: str) -> None:
        """Ends a request whose client has gone. Does nothing if it has ended already."""
        self.finish(request_id, FinishReason.ABORT)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends a request for a reason that is not seen here, as a stop string.

        Does nothing if it has ended already. While a step with it is in flight the request's
        blocks stay, as the runner may be writing to them, and its results will be dropped.
        """
        request = self._sequences.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)

    # A step.

    def schedule(self) -> StepPlan:
        """What to compute next. Follow a plan that is not empty by update(), fail_step() or
        discard_step(). An empty one while steps are in flight: wait for the first of them."""
        if len(self._steps) >= self.max_steps_in_flight:
            raise RuntimeError("the oldest step in flight has been neither updated nor failed")
        return self._planner.plan()

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Applies a step's results; one event per sequence that got tokens or ended."""
        step = self._take_step(plan)
        if len(result.sequences) != len(step.requests):
            raise RuntimeError(
                f"{len(step.requests)} sequences ran, {len(result.sequences)} came back"
            )
        events: list[TokenEvent] = []
        self._update_decodes(step.requests[: step.num_decodes], result.sequences, events)
        entries = zip(
            step.requests,
            zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True),
            plan.is_sampling,
            result.sequences,
            strict=True,
        )
        for request, chunk, is_sampling, sequence in islice(entries, step.num_decodes, None):
            event = self._update_chunk(request, chunk, is_sampling, sequence)
            if event is not None:
                events.append(event)
        return events

    def fail_step(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """The step raised: its requests end with an error, and nothing of it will be reused.

        Steps behind it rest on it: once they have ended, discard them, whatever they gave.
        """
        step = self._take_step(plan)
        self._sequences.release_again(plan.released_ids)  # the runner may not have got to them
        return [
            self._fail(request, message)
            for request in step.requests
            if request.status is RequestStatus.RUNNING
        ]

    def retry_step(self, plan: StepPlan) -> bool:
        """The step needed more memory than there is: its sequences start anew, in smaller steps.

        False, and nothing has changed, if one of them did so before. Schedule nothing until the
        steps behind it have ended.
        """
        if not self._retried.isdisjoint(plan.request_ids):
            return False
        self._retried.update(plan.request_ids)
        self.discard_step(plan)
        self._planner.shrink(plan.total_num_scheduled_tokens, len(plan.request_ids))
        return True

    def discard_step(self, plan: StepPlan) -> None:
        """The step does not count, whether it ran or not: its sequences start anew."""
        step = self._take_step(plan)
        self._sequences.release_again(plan.released_ids)
        for request in step.requests:
            if request.status is RequestStatus.RUNNING:
                self._planner.preempt(request)

    # Results.

    def _take_step(self, plan: StepPlan) -> StepInFlight:
        """The step has ended; those that ended before it let go."""
        step = self._steps.pop(plan)
        for request in step.ended:
            self._manager.free(request)
        return step

    def _update_decodes(
        self, requests: list[Request], sequences: list[SeqResult], events: list[TokenEvent]
    ) -> None:
        """Written for speed: this loop runs once per generated token."""
        mask = self._block_size - 1
        running = RequestStatus.RUNNING
        for request, result in zip(requests, sequences, strict=False):
            if request.status is not running:
                continue
            if result.error is not None:
                events.append(
                    self._fail(request, result.error, is_callers_fault=result.is_callers_fault)
                )
                continue
            token_ids = request.token_ids
            num_computed = len(token_ids)  # its last known token was this step's input
            if not num_computed & mask:
                self._manager.cache_blocks(request, num_computed)
            token_id = result.token_ids[0]
            token_ids.append(token_id)
            event = TokenEvent(request.request_id, result.token_ids, result.logprobs)
            events.append(event)
            sampling = request.sampling
            if (
                num_computed + 1 >= request.max_num_tokens
                or token_id in sampling.eos_token_ids
                or token_id in sampling.stop_token_ids
            ):
                self._end_if_done(request, event)

    def _update_chunk(
        self, request: Request, chunk: tuple[int, int], is_sampling: bool, result: SeqResult
    ) -> TokenEvent | None:
        """A step computed some known tokens: (where they start, how many)."""
        if request.status is not RequestStatus.RUNNING:
            return None
        if result.error is not None:
            return self._fail(request, result.error, is_callers_fault=result.is_callers_fault)
        self._manager.cache_blocks(request, sum(chunk))
        event = TokenEvent(request.request_id, result.token_ids, result.logprobs)
        if result.prompt_logprobs is not None:
            event.prompt_logprobs = self._prompt_logprobs.receive(
                request.request_id, result.prompt_logprobs, is_first=chunk[0] == 0
            )
        if not is_sampling:
            return event if event.prompt_logprobs else None
        request.token_ids.append(result.token_ids[0])
        self._sequences.release_children(request)
        self._end_if_done(request, event)
        return event

    def _end_if_done(self, request: Request, event: TokenEvent) -> None:
        event.finish_reason, event.stop_reason = find_stop(request)
        if event.finish_reason is not None:
            self._end(request, event.finish_reason, event.stop_reason)

    def _fail(
        self, request: Request, message: str, *, is_callers_fault: bool = False
    ) -> TokenEvent:
        self._end(request, FinishReason.ERROR, None)
        event = TokenEvent(request.request_id, (), finish_reason=FinishReason.ERROR, error=message)
        event.is_callers_fault = is_callers_fault
        return event

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._sequences.end(request, reason, stop_reason)
        self._retried.discard(request.request_id)
        self._prompt_logprobs.forget(request.request_id)
        if not self._steps.keep_blocks(request):
            self._manager.free(request)
        self._sequences.release_children(request)
