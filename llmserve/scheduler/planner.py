"""What the next step computes: chunks of running sequences, room for them, and new sequences.

Owns nothing but the flag that blocks have run out; moves sequences between their queues, and takes
blocks for them.
"""

from __future__ import annotations

from collections.abc import Callable

from llmserve.core import NewSequence, Request, RequestStatus, StepPlan
from llmserve.kvcache import KVCacheManager
from llmserve.scheduler.sequences import Sequences
from llmserve.scheduler.steps_in_flight import StepInFlight, StepsInFlight

Chunk = tuple[Request, int]  # and how many of its tokens a step computes


class StepPlanner:
    """Running sequences come first; whoever needs blocks takes them from the last in the order.

    While steps are in flight nobody loses blocks, as those steps may write to them. When blocks run
    out then, no step is planned until all have ended.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_chunk: int,
        prompt_tokens_beside: Callable[[int, Callable[[int], int]], int],
        manager: KVCacheManager,
        sequences: Sequences,
        steps: StepsInFlight,
        clock: Callable[[], float],
    ) -> None:
        """`max_chunk`: most tokens of one sequence in one step. `prompt_tokens_beside`: most tokens
        of prompts in a step, by how many sequences decode in it and a count of those that wait."""
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_chunk = max_chunk
        self._prompt_tokens_beside = prompt_tokens_beside
        self._manager = manager
        self._sequences = sequences
        self._steps = steps
        self._clock = clock
        self._is_short_of_blocks = False

    def plan(self) -> StepPlan:
        """The next step, which is in flight from now on unless it is empty."""
        plan = StepPlan()
        if self._is_short_of_blocks and self._steps:
            return plan
        self._is_short_of_blocks = False
        num_preemptions = self._sequences.num_preemptions
        decodes = self._schedule_decodes(plan)
        budget = min(
            self._max_num_batched_tokens - len(decodes),
            self._prompt_tokens_beside(len(decodes), self._sequences.count_waiting_tokens),
        )
        chunks = self._schedule_prefilling(plan, budget)
        if self._sequences.num_preemptions > num_preemptions:
            decodes = [request for request in decodes if request.status is RequestStatus.RUNNING]
        elif not self._is_short_of_blocks:
            self._schedule_waiting(plan, chunks, budget)
        if decodes or chunks:
            self._fill(plan, decodes, chunks)
        return plan

    def shrink(self, num_tokens: int, num_seqs: int) -> None:
        """Steps are smaller from now on than one of that size, which was too large.

        Where it had prompts, by half of its tokens. Decodes leave no tokens away, so of them half
        of the sequences run; and never more run than there may be tokens. The others wait.
        """
        if num_tokens > num_seqs:
            num_seqs = max(1, min(num_tokens // 2, self._max_num_batched_tokens))
            self._max_num_batched_tokens = num_seqs
        else:
            num_seqs = max(1, num_seqs // 2)
        self._max_num_seqs = min(num_seqs, self._max_num_seqs)
        while self._sequences.num_running > self._max_num_seqs:
            self.preempt(self._sequences.last_running)

    def preempt(self, request: Request) -> None:
        """Takes a running sequence's blocks, not its tokens."""
        self._manager.free(request, keep_hashes=True)
        self._sequences.preempt(request)
        request.num_computed_tokens = 0

    def _schedule_decodes(self, plan: StepPlan) -> list[Request]:
        """Every decoding sequence runs, but those that end with the token in flight for certain.

        One in `block_size` needs blocks for its next token.
        """
        mask = self._manager.block_size - 1  # the block size is a power of two
        decodes = [
            request
            for request in self._sequences.decoding
            if request.num_computed_tokens + 1 < request.max_num_tokens
        ]
        due = [request for request in decodes if not request.num_computed_tokens & mask]
        left_out = [request for request in due if not self._allocate(request, 1, plan)]
        if left_out:
            decodes = [request for request in decodes if request not in left_out]
        return decodes

    def _schedule_prefilling(self, plan: StepPlan, budget: int) -> list[Chunk]:
        """Next chunks of running sequences that miss more than their last token."""
        chunks: list[Chunk] = []
        for request in list(self._sequences.prefilling):
            num_tokens = self._chunk_size(request, budget)
            if num_tokens > 0 and self._allocate(request, num_tokens, plan):
                chunks.append((request, num_tokens))
                budget -= num_tokens
        return chunks

    def _schedule_waiting(self, plan: StepPlan, chunks: list[Chunk], budget: int) -> None:
        """Starts waiting sequences in order, until one does not fit; appends to `chunks`."""
        sequences = self._sequences
        budget -= sum(num_tokens for _, num_tokens in chunks)
        while len(sequences.waiting) and budget > 0 and sequences.num_running < self._max_num_seqs:
            request = sequences.waiting.head
            if self._steps.keeps_blocks_of(request.request_id):
                return  # one of the same id was aborted, and the next one came at once
            if not self._fork(request, plan) and not self._start(request, budget):
                return
            sequences.start(request)
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
        parent = self._sequences.get(request.parent_id)
        if (
            parent is None
            or parent.status is not RequestStatus.RUNNING
            or not self._steps.have_computed_prompt(parent)
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

        Left out is also who was preempted for another one in this step, or needs blocks that run
        out while steps are in flight.
        """
        if request.status is not RequestStatus.RUNNING or self._is_short_of_blocks:
            return False
        while (block_ids := self._manager.allocate_slots(request, num_tokens)) is None:
            if self._steps:
                self._is_short_of_blocks = True
                return False
            victim = self._sequences.last_running
            # Never one of the step's chunks: those come earlier than the one that needs the blocks.
            plan.new_block_ids.pop(victim.request_id, None)
            self.preempt(victim)
            if victim is request:
                return False
        if block_ids:
            plan.new_block_ids[request.request_id] = block_ids
        return True

    def _fill(self, plan: StepPlan, decodes: list[Request], chunks: list[Chunk]) -> None:
        requests = decodes + [request for request, _ in chunks]
        plan.request_ids = [request.request_id for request in requests]
        plan.num_computed_tokens = [request.num_computed_tokens for request in requests]
        plan.num_scheduled_tokens = [1] * len(decodes) + [num_tokens for _, num_tokens in chunks]
        plan.is_sampling = [True] * len(decodes)
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens)
        plan.released_ids = self._sequences.take_released()
        plan.needs_last_result = self._sequences.num_dependent > 0 and len(self._steps) > 0
        self._advance(plan, decodes, chunks)
        self._steps.push(StepInFlight(plan, requests, len(decodes)))

    def _advance(self, plan: StepPlan, decodes: list[Request], chunks: list[Chunk]) -> None:
        for request in decodes:
            request.num_computed_tokens += 1
        for request, num_tokens in chunks:
            request.num_computed_tokens += num_tokens
            is_sampling = request.num_computed_tokens == request.num_tokens
            plan.is_sampling.append(is_sampling)
            if is_sampling:
                self._sequences.start_decoding(request)
