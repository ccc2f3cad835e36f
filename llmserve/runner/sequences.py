"""What a runner keeps of its sequences between steps, and what a plan changes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.runner.batch import SequenceRows
from llmserve.runner.kv_tensors import KVTensors
from llmserve.runner.sampler import Sampler

_PROBE_ID = "\0probe"
_PROBE_SAMPLING = SamplingParams(temperature=0.0)


@contextmanager
def probe_step(rows: SequenceRows, num_groups: int) -> Iterator[StepPlan]:
    """A step of one token on the null block, whose sequence has a row meanwhile."""
    rows.add(NewSequence(_PROBE_ID, [0], 1, _PROBE_SAMPLING, ([0],) * num_groups))
    try:
        yield StepPlan([_PROBE_ID], [0], [1], [True])
    finally:
        rows.release(_PROBE_ID)


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest:
    """Log-probabilities of prompt tokens that a sequence still has to compute."""

    num_prompt_tokens: int
    num_logprobs: int


class Sequences:
    """Rows, sampling state and blocks, by request id."""

    def __init__(self, rows: SequenceRows, sampler: Sampler, kv: KVTensors) -> None:
        self.rows = rows
        self.sampler = sampler
        self.kv = kv
        self.prompt_logprobs: dict[str, PromptLogprobsRequest] = {}

    def apply(self, plan: StepPlan) -> None:
        """Makes the changes that come before the plan's forward pass."""
        self.forget(plan.released_ids)
        for sequence in plan.new:
            self.rows.add(sequence)
            self._start(sequence)
        for request_id, block_ids in plan.new_block_ids.items():
            self.rows.append_blocks(request_id, block_ids)
        if plan.block_copies:
            self.kv.copy_blocks(plan.block_copies)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops all state of sequences; those that are not held are no error."""
        for request_id in request_ids:
            self.rows.release(request_id)
            self.sampler.remove(request_id)
            self.prompt_logprobs.pop(request_id, None)

    def _start(self, sequence: NewSequence) -> None:
        num_prompt_tokens = sequence.num_prompt_tokens
        prompt = sequence.token_ids[:num_prompt_tokens]
        output = sequence.token_ids[num_prompt_tokens:]
        self.sampler.add(sequence.request_id, sequence.sampling, prompt, output)
        num_logprobs = sequence.sampling.num_prompt_logprobs
        if num_logprobs is not None and not output:
            self.prompt_logprobs[sequence.request_id] = PromptLogprobsRequest(
                num_prompt_tokens, num_logprobs
            )


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows of hidden states that give log-probabilities of prompt tokens, in a step."""

    index: int  # of the sequence in the plan
    first: int  # the first row
    target_ids: list[int]  # tokens, one per row
    num_logprobs: int
    is_first: bool  # the chunk begins the prompt, whose first token has no value


def prompt_chunks(sequences: Sequences, plan: StepPlan) -> list[PromptChunk]:
    """Of the sequences that want them; those whose prompt ends with the step are done with it."""
    chunks = []
    begin_of_tokens = 0
    for index, request_id in enumerate(plan.request_ids):
        first = begin_of_tokens
        begin_of_tokens += plan.num_scheduled_tokens[index]
        request = sequences.prompt_logprobs.get(request_id)
        if request is None:
            continue
        begin = plan.num_computed_tokens[index]
        num_scheduled = plan.num_scheduled_tokens[index]
        end = min(begin + num_scheduled, request.num_prompt_tokens - 1)
        row = sequences.rows.row(request_id)
        targets = sequences.rows.token_ids[row, begin + 1 : end + 1].tolist()
        chunks.append(PromptChunk(index, first, targets, request.num_logprobs, begin == 0))
        if begin + num_scheduled >= request.num_prompt_tokens:
            del sequences.prompt_logprobs[request_id]
    return chunks
