"""Scheduler: which sequences run in a step, with how many tokens; and what a step's result means.

There is no prefill phase and no decode phase (Sarathi-Serve, Agrawal et al. 2024, 2403.02310): in
each step a sequence computes some of the tokens that it has not computed yet. Decoding sequences,
which miss one, come first, so a long prompt never holds them up. When blocks run out, the last
sequence in the policy's order loses its blocks and computes them again later (recomputation as in
PagedAttention, Kwon et al. 2023, 2309.06180). Knows token ids only; is the only writer of Request.
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
    NewSequence,
    Request,
    RequestStatus,
    SeqResult,
    StepPlan,
    StepResult,
    TokenEvent,
)
from llmserve.errors import ContextLengthError, StartupError
from llmserve.kvcache import KVCacheManager, max_tokens_that_fit
from llmserve.scheduler.policy import KEYS, RequestQueue
from llmserve.scheduler.prompt_logprobs import PromptLogprobsProgress

Chunk = tuple[Request, int]  # and how many of its tokens a step computes


class SchedulerCounts(NamedTuple):
    """What happened since the last call of Scheduler.take_counts()."""

    preemptions: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens


class Scheduler:
    """One step is schedule() -> execute -> update(), or fail_step() if execute raised.

    Invariants:

    * a request is in exactly one of: `_waiting`, `_held`, `_prefilling`, `_decoding`;
    * a decoding request misses exactly its last token, and its tables cover the ones before;
    * only running requests hold blocks, and the aborted ones of a step in flight;
    * the runner knows the running requests, and the ones in `_released`.
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
        self._config = config
        self._block_size = kv_spec.block_size
        max_step_tokens = config.token_budget
        max_chunk = min(config.long_prefill_token_threshold or max_step_tokens, max_step_tokens)
        self._max_chunk = max_chunk
        self._clock = clock
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
        self._key = KEYS[config.scheduling_policy]
        self._waiting = RequestQueue(self._key)
        self._prefilling = RequestQueue(self._key)
        self._decoding: list[Request] = []
        self._held: dict[str, list[Request]] = {}  # children, by the parent they wait for
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._in_flight: list[Request] = []  # the sequences of the plan that is being executed
        self._num_decodes_in_flight = 0  # the first ones of them
        self._aborted_in_flight: list[Request] = []
        self._released: dict[str, None] = {}  # for the next plan's released_ids
        self._prompt_logprobs = PromptLogprobsProgress()
        self._num_preemptions = 0
        self._counted = SchedulerCounts(0, 0, 0)

    # State, read by others.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._held.values()))

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV cache blocks in use, 0 to 1."""
        return self._manager.usage

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    def take_counts(self) -> SchedulerCounts:
        """What was counted since the last call."""
        manager, last = self._manager, self._counted
        now = SchedulerCounts(
            self._num_preemptions, manager.prefix_cache_queries, manager.prefix_cache_hits
        )
        self._counted = now
        return SchedulerCounts(now[0] - last[0], now[1] - last[1], now[2] - last[2])

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is reused by later requests."""
        self._manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """RuntimeError if block tables and pool contradict one another. For tests."""
        self._manager.check_integrity()

    # Requests come and go. All of these may be called while a step is in flight.

    def add(self, request: Request) -> None:
        """Queues a sequence. ContextLengthError if its prompt and one token can never fit."""
        if request.request_id in self._requests:
            raise ValueError(f"there is a request {request.request_id} already")
        if request.num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {request.num_prompt_tokens} tokens; with one token of output it "
                f"exceeds the {self.max_model_len} tokens that a request can have here",
                param="prompt",
            )
        request.arrival_index = self._num_added
        self._num_added += 1
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len
        )
        self._requests[request.request_id] = request
        parent = self._requests.get(request.parent_id) if request.parent_id else None
        if parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens:
            self._held.setdefault(parent.request_id, []).append(request)
        else:
            self._waiting.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request whose client has gone. Does nothing if it has ended already."""
        self.finish(request_id, FinishReason.ABORT)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends a request for a reason that is not seen here, as a stop string.

        Does nothing if it has ended already. While its step is in flight the request's blocks
        stay, as the runner may be writing to them, and its result will be dropped.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)

    # A step.

    def schedule(self) -> StepPlan:
        """What to compute next. Follow a plan that is not empty by update() or fail_step()."""
        if self._in_flight:
            raise RuntimeError("the last step has been neither updated nor failed")
        plan = StepPlan()
        num_preemptions = self._num_preemptions
        self._schedule_decodes(plan)
        chunks = self._schedule_prefilling(plan)
        if self._num_preemptions == num_preemptions:  # else there is no room for more
            self._schedule_waiting(plan, chunks)
        self._fill(plan, chunks)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Applies a step's results; one event per sequence that got tokens or ended."""
        in_flight = self._take_in_flight()
        if len(result.sequences) != len(in_flight):
            raise RuntimeError(f"{len(in_flight)} sequences ran, {len(result.sequences)} came back")
        num_decodes = self._num_decodes_in_flight
        events: list[TokenEvent] = []
        self._update_decodes(in_flight[:num_decodes], result.sequences, events)
        chunks = zip(in_flight, plan.num_scheduled_tokens, result.sequences, strict=True)
        for request, num_tokens, sequence in islice(chunks, num_decodes, None):
            event = self._update_chunk(request, num_tokens, sequence)
            if event is not None:
                events.append(event)
        return events

    def fail_step(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """The step raised: its requests end with an error, and nothing of it will be reused."""
        self._released |= dict.fromkeys(plan.released_ids)  # the runner may not have got to them
        return [
            self._fail(request, message)
            for request in self._take_in_flight()
            if request.status is RequestStatus.RUNNING
        ]

    # Scheduling.

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Every decoding sequence runs; one in `block_size` needs blocks for its next token."""
        mask = self._block_size - 1  # the block size is a power of two
        for request in [r for r in self._decoding if not r.num_computed_tokens & mask]:
            self._allocate(request, 1, plan)

    def _schedule_prefilling(self, plan: StepPlan) -> list[Chunk]:
        """Next chunks of running sequences that miss more than their last token."""
        chunks: list[Chunk] = []
        budget = self._config.token_budget - len(self._decoding)
        for request in list(self._prefilling):
            num_tokens = self._chunk_size(request, budget)
            if num_tokens > 0 and self._allocate(request, num_tokens, plan):
                chunks.append((request, num_tokens))
                budget -= num_tokens
        return chunks

    def _schedule_waiting(self, plan: StepPlan, chunks: list[Chunk]) -> None:
        """Starts waiting sequences in order, until one does not fit; appends to `chunks`."""
        budget = self._config.token_budget - len(self._decoding)
        budget -= sum(num_tokens for _, num_tokens in chunks)
        while len(self._waiting) and budget > 0 and self.num_running < self._config.max_num_seqs:
            request = self._waiting.head
            if not self._fork(request, plan) and not self._start(request, budget):
                return
            self._waiting.remove(request)
            self._prefilling.add(request)
            request.status = RequestStatus.RUNNING
            plan.new.append(
                NewSequence(
                    request.request_id,
                    request.token_ids,
                    request.num_prompt_tokens,
                    request.sampling,
                    self._manager.block_ids(request.request_id),
                )
            )
            num_tokens = self._chunk_size(request, budget)
            chunks.append((request, num_tokens))
            budget -= num_tokens

    def _chunk_size(self, request: Request, budget: int) -> int:
        return min(request.num_tokens - request.num_computed_tokens, budget, self._max_chunk)

    def _fork(self, request: Request, plan: StepPlan) -> bool:
        """Starts a child from its parent's blocks, where the parent still has all it needs."""
        parent = self._requests.get(request.parent_id) if request.parent_id else None
        if (
            parent is None
            or parent.status is not RequestStatus.RUNNING
            or parent.num_computed_tokens < parent.num_prompt_tokens
            or request.num_output_tokens > 0
        ):
            return False
        copies = self._manager.fork(parent, request)
        if copies is None:
            return False
        plan.block_copies += copies
        request.num_computed_tokens = request.num_prompt_tokens - 1
        self._note_first_schedule(request, parent.num_cached_tokens)
        return True

    def _start(self, request: Request, budget: int) -> bool:
        """Starts a sequence from what the prefix cache has of it."""
        prefix = self._manager.get_computed_blocks(request)
        request.num_computed_tokens = prefix.num_tokens
        if not self._manager.start(request, self._chunk_size(request, budget), prefix):
            request.num_computed_tokens = 0
            return False
        self._note_first_schedule(request, prefix.num_tokens)
        return True

    def _note_first_schedule(self, request: Request, num_cached_tokens: int) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            request.num_cached_tokens = num_cached_tokens

    def _allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Makes room for a running sequence, at the cost of later ones; False if it was the last.

        A sequence that was preempted for another one in this step is left alone.
        """
        if request.status is not RequestStatus.RUNNING:
            return False
        while (block_ids := self._manager.allocate_slots(request, num_tokens)) is None:
            victim = max((*self._decoding, *self._prefilling), key=self._key)
            self._preempt(victim, plan)
            if victim is request:
                return False
        if block_ids:
            plan.new_block_ids[request.request_id] = block_ids
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Takes a sequence's blocks, not its tokens. It has no place in `plan` any more.

        It is never among the chunks of this step: those come earlier in the order than the
        sequence that needs the blocks.
        """
        plan.new_block_ids.pop(request.request_id, None)
        self._manager.free(request, keep_hashes=True)
        self._remove_running(request)
        self._prompt_logprobs.restart(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.add(request)

    def _remove_running(self, request: Request) -> None:
        if request in self._decoding:
            self._decoding.remove(request)
        else:
            self._prefilling.remove(request)
        self._released[request.request_id] = None

    def _fill(self, plan: StepPlan, chunks: list[Chunk]) -> None:
        num_decodes = len(self._decoding)
        in_flight = self._decoding + [request for request, _ in chunks]
        if not in_flight:
            return  # a plan that is not executed releases nothing
        plan.request_ids = [request.request_id for request in in_flight]
        plan.num_computed_tokens = [request.num_computed_tokens for request in in_flight]
        plan.num_scheduled_tokens = [1] * num_decodes + [num_tokens for _, num_tokens in chunks]
        plan.is_sampling = [True] * num_decodes + [
            request.num_computed_tokens + num_tokens == request.num_tokens
            for request, num_tokens in chunks
        ]
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens)
        plan.released_ids = list(self._released)
        self._released.clear()
        self._in_flight = in_flight
        self._num_decodes_in_flight = num_decodes

    # Results.

    def _take_in_flight(self) -> list[Request]:
        """The sequences of the step that has just ended; those aborted meanwhile let go."""
        in_flight, self._in_flight = self._in_flight, []
        for request in self._aborted_in_flight:
            self._manager.free(request)
        self._aborted_in_flight.clear()
        return in_flight

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
            request.num_computed_tokens = num_computed = request.num_computed_tokens + 1
            if not num_computed & mask:
                self._manager.cache_blocks(request)
            token_ids = request.token_ids
            token_id = result.token_ids[0]
            token_ids.append(token_id)
            event = TokenEvent(request.request_id, result.token_ids, result.logprobs)
            events.append(event)
            sampling = request.sampling
            if (
                len(token_ids) >= request.max_num_tokens
                or token_id in sampling.eos_token_ids
                or token_id in sampling.stop_token_ids
            ):
                self._end_if_done(request, event)

    def _update_chunk(
        self, request: Request, num_tokens: int, result: SeqResult
    ) -> TokenEvent | None:
        """A sequence's tokens up to its last known one; with the last one it starts to decode."""
        if request.status is not RequestStatus.RUNNING:
            return None
        if result.error is not None:
            return self._fail(request, result.error, is_callers_fault=result.is_callers_fault)
        request.num_computed_tokens += num_tokens
        self._manager.cache_blocks(request)
        event = TokenEvent(request.request_id, result.token_ids, result.logprobs)
        if result.prompt_logprobs is not None:
            event.prompt_logprobs = self._prompt_logprobs.receive(
                request.request_id, result.prompt_logprobs
            )
        if request.num_computed_tokens < request.num_tokens:
            return event if event.prompt_logprobs else None
        request.token_ids.append(result.token_ids[0])
        self._prefilling.remove(request)
        self._decoding.append(request)
        self._release_children(request)
        self._end_if_done(request, event)
        return event

    def _end_if_done(self, request: Request, event: TokenEvent) -> None:
        """Applies the stop rules to the last token."""
        sampling, token_id = request.sampling, request.token_ids[-1]
        may_stop = request.num_output_tokens >= sampling.min_tokens
        if may_stop and token_id in sampling.eos_token_ids:
            event.finish_reason = FinishReason.STOP
        elif may_stop and token_id in sampling.stop_token_ids:
            event.finish_reason, event.stop_reason = FinishReason.STOP, token_id
        elif request.num_tokens >= request.max_num_tokens:
            event.finish_reason = FinishReason.LENGTH
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
        if request.status is RequestStatus.RUNNING:
            self._remove_running(request)
        elif request in self._held.get(request.parent_id or "", ()):
            self._held[request.parent_id or ""].remove(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]
        self._prompt_logprobs.forget(request.request_id)
        if request in self._in_flight:
            self._aborted_in_flight.append(request)
        else:
            self._manager.free(request)
        self._release_children(request)

    def _release_children(self, parent: Request) -> None:
        """The children of a sequence that has its prompt computed, or is gone, may start."""
        for child in self._held.pop(parent.request_id, ()):
            self._waiting.add(child)
