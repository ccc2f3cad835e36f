"""ModelRunner: executes step plans. Owns the rows, the KV tensors and the sampler's state.

Runs in one thread and knows no requests beyond their ids. A failed step needs no undoing: the next
plan releases its sequences, and a row or a block is written before it is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from llmserve.core import (
    FinishedStep,
    KVCacheSpec,
    PendingStep,
    PromptLogprobs,
    SeqResult,
    StepPlan,
    StepResult,
)
from llmserve.kernels import Kernels
from llmserve.models import Decoder
from llmserve.runner.batch import SequenceRows, StepBatch
from llmserve.runner.kv_tensors import KVTensors
from llmserve.runner.memory import max_logit_rows
from llmserve.runner.sampler import Sampler
from llmserve.runner.sequences import Sequences, probe_step, prompt_chunks


class ModelRunner:
    """One model with its KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        spec: KVCacheSpec,
        num_blocks: int,
        kernels: Kernels,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._decoder = decoder
        self._kv = KVTensors(spec, num_blocks, kernels)
        self._num_groups = len(spec.groups)
        # One more row than sequences, for the probe.
        self._rows = SequenceRows(
            max_num_seqs + 1, max_model_len, spec.block_size, self._num_groups
        )
        self._sampler = Sampler(kernels)
        self._sequences = Sequences(self._rows, self._sampler, self._kv)
        # Logits are made in slices, in one buffer: they are the largest values of a step, and
        # memory that comes and goes in such pieces stays with the process in fragments.
        rows = torch.empty(max_logit_rows(max_num_seqs), decoder.vocab_size, device=kernels.device)
        self._max_logit_rows = len(rows)
        self._logits = [rows[:n] for n in range(len(rows) + 1)]

    def launch(self, plan: StepPlan) -> PendingStep:
        """Runs one step to its end. Raises what execute() raises."""
        return FinishedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step and returns a result per entry of plan.request_ids, in that order.

        The sampled token becomes the sequence's next input. Prompt logprobs, where asked for:
        the forward pass of prompt position i gives the entry of prompt token i + 1, so a chunk
        [begin, end) gives the entries of tokens begin + 1 .. end (at the end of the prompt, to its
        last token), and the first chunk begins with None for token 0. The chunks' lists joined are
        one entry per prompt token. A sequence that resumes with output does not repeat them; one
        that was preempted within its prompt begins again with None.

        Raises what a kernel raises, and KeyError for a sequence that no plan announced; the
        sequences of the plan must then be released.
        """
        self._sequences.apply(plan)
        if plan.is_empty:
            return StepResult()
        with torch.inference_mode():
            batch = self._rows.build(plan)
            hidden = self._decoder.forward(batch.forward, self._kv.layers)
            results = [SeqResult()] * len(plan.request_ids)
            self._sample(plan, batch, hidden, results)
            if self._sequences.prompt_logprobs:
                self._add_prompt_logprobs(plan, hidden, results)
        return StepResult(results)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops all state of sequences; those that are not held are no error."""
        self._sequences.forget(request_ids)

    def probe(self) -> None:
        """A forward pass of one token on the null block; raises if the runner cannot compute."""
        with probe_step(self._rows, self._num_groups) as plan, torch.inference_mode():
            hidden = self._decoder.forward(self._rows.build(plan).forward, self._kv.layers)
            logits = self._compute_logits(hidden)
        if not bool(logits.isfinite().all()):
            raise RuntimeError("the model gives logits that are not finite")

    def _sample(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, results: list[SeqResult]
    ) -> None:
        """Fills `results` for the sequences that sample, and appends their tokens."""
        sampling = [i for i, is_sampling in enumerate(plan.is_sampling) if is_sampling]
        if not sampling:
            return
        if len(sampling) == hidden.shape[0]:
            last_hidden = hidden
        else:
            last_hidden = hidden[torch.from_numpy(batch.last_token_idx[sampling])]
        num_rows = self._max_logit_rows
        for begin in range(0, len(sampling), num_rows):
            indices = sampling[begin : begin + num_rows]
            rows = last_hidden
            if len(sampling) > num_rows:
                rows = last_hidden[begin : begin + num_rows]
            logits = self._compute_logits(rows)
            sampled = self._sampler.sample(logits, [plan.request_ids[i] for i in indices])
            for index, result in zip(indices, sampled, strict=True):
                results[index] = result
                for token_id in result.token_ids:
                    self._rows.append_token(batch.rows[index], token_id)

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of as many rows as the buffer has at most; valid until the next call."""
        return self._decoder.compute_logits(hidden, self._logits[hidden.shape[0]])

    def _add_prompt_logprobs(
        self, plan: StepPlan, hidden: torch.Tensor, results: list[SeqResult]
    ) -> None:
        for chunk in prompt_chunks(self._sequences, plan):
            entries: PromptLogprobs = [None] if chunk.is_first else []
            rows = hidden[chunk.first : chunk.first + len(chunk.target_ids)]
            entries += self._logprobs(rows, chunk.target_ids, chunk.num_logprobs)
            results[chunk.index] = dataclasses.replace(
                results[chunk.index], prompt_logprobs=entries
            )

    def _logprobs(self, hidden: torch.Tensor, targets: list[int], k: int) -> PromptLogprobs:
        num_rows = self._max_logit_rows
        entries: PromptLogprobs = []
        for begin in range(0, len(targets), num_rows):
            end = begin + num_rows
            logits = self._compute_logits(hidden[begin:end])
            entries += self._sampler.prompt_logprobs(logits, targets[begin:end], k).result()
        return entries
