"""CUDARunner: executes step plans on a GPU without waiting for it.

launch() hands a step to the device and returns; the tokens that it samples stay there, one per row,
and are the next step's input. What the host wants to know follows through pinned memory; whoever
waits for the step reads it behind an event. A failed step needs no undoing, as in ModelRunner.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
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
from llmserve.errors import StepOutOfMemoryError
from llmserve.kernels import SAMPLING_ROW, KVScales
from llmserve.kernels.cuda.kernels import CUDAKernels, DeviceSampledRows
from llmserve.kernels.cuda.transfer import Mark
from llmserve.models import Decoder, ForwardBatch
from llmserve.runner.batch import Ints, SequenceRows, StepArrays
from llmserve.runner.cuda_graphs import DecodeGraphs, GraphKey, Recorder
from llmserve.runner.device_inputs import DeviceInputs, Feeds
from llmserve.runner.kv_tensors import KVTensors
from llmserve.runner.piecewise_graphs import PiecewiseGraphs
from llmserve.runner.sampler import PromptRows, Sampler, Sampling
from llmserve.runner.sequences import PromptChunk, Sequences, probe_step, prompt_chunks


class CUDARunner:
    """One model with its KV cache. launch() and probe() are for one thread."""

    def __init__(
        self,
        decoder: Decoder,
        spec: KVCacheSpec,
        num_blocks: int,
        kernels: CUDAKernels,
        recorder: Recorder | None,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        kv_scales: Sequence[KVScales | None] | None = None,
    ) -> None:
        """max_num_tokens: of a step. recorder: None runs every step kernel by kernel. kv_scales: by
        layer, as KVTensors takes them."""
        self._decoder = decoder
        self._kernels = kernels
        self._kv = KVTensors(spec, num_blocks, kernels, kv_scales)
        self._num_groups = len(spec.groups)
        # One more row than sequences, for the probe.
        self._rows = SequenceRows(
            max_num_seqs + 1, max_model_len, spec.block_size, self._num_groups
        )
        self._sampler = Sampler(kernels)
        self._sequences = Sequences(self._rows, self._sampler, self._kv)
        self._inputs = DeviceInputs(
            kernels.device,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            num_groups=self._num_groups,
            max_blocks=-(-max_model_len // spec.block_size),
        )
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=kernels.device)
        self._logits = torch.empty(max_num_seqs, decoder.vocab_size, device=kernels.device)
        self._max_model_len = max_model_len
        self._decode_graphs: DecodeGraphs | None = None
        self._piecewise_graphs: PiecewiseGraphs | None = None
        if recorder is not None:
            self._decode_graphs = DecodeGraphs(
                recorder,
                self._run_decode,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            )
            self._piecewise_graphs = PiecewiseGraphs(
                recorder, kernels, self._run_padding, max_num_tokens
            )

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step; results as those of ModelRunner.execute.

        Raises StepOutOfMemoryError if the device lacks memory for it, and what else torch raises;
        the sequences of the plan must then be released.
        """
        self._sequences.apply(plan)
        if plan.is_empty:
            return FinishedStep(StepResult())
        try:
            with torch.inference_mode():
                return self._launch(plan)
        except torch.OutOfMemoryError as error:
            if self._kernels.device.type == "cuda":
                torch.cuda.empty_cache()
            raise StepOutOfMemoryError(str(error)) from error

    def probe(self) -> None:
        """A forward pass of one token on the null block; raises if the device cannot compute."""
        with probe_step(self._rows, self._num_groups) as plan:
            arrays = self._rows.arrange(plan)
        with torch.inference_mode():
            self._inputs.fill(arrays, self._feeds(arrays, np.zeros(1, np.int64)))
            hidden = self._forward(self._batch(arrays))
            logits = self._decoder.compute_logits(hidden, self._logits[:1])
            is_finite = bool(logits.isfinite().all())  # waits for the device
        if not is_finite:
            raise RuntimeError("the model gives logits that are not finite")

    def run_largest_steps(self) -> None:
        """The steps that need most memory, over no sequence's tokens: for the measure of it, and so
        that buffers have their final size before graphs refer to them."""
        max_num_tokens, max_num_seqs = self._inputs.max_num_tokens, self._inputs.max_num_seqs
        with torch.inference_mode():
            for num_tokens in (max_num_tokens, max_num_seqs):
                self._inputs.fill_padding(max_num_seqs, num_tokens)
                longest = -(-num_tokens // max_num_seqs)
                batch = self._inputs.batch(num_tokens, max_num_seqs, longest, self._max_model_len)
                hidden = self._decoder.forward(batch, self._kv.layers)
                logits = self._compute_logits(hidden[:max_num_seqs])
                params = np.zeros(max_num_seqs, SAMPLING_ROW)
                params[:] = (1.0, 0.9, 0.0, 50, 0, 0)
                self._kernels.sample_rows(logits, params)

    def _launch(self, plan: StepPlan) -> PendingStep:
        arrays = self._rows.arrange(plan)
        sampling = np.flatnonzero(plan.is_sampling)
        feeds = self._feeds(arrays, sampling)
        prompts: list[_PromptPart] = []
        key = self._graph_key(arrays)
        if key and self._decode_graphs and (run := self._decode_graphs.find(key)):
            self._decoder.reserve_positions(arrays.max_seq_len)
            self._inputs.fill(arrays, feeds, num_seqs=key.num_seqs)
            run()
            logits = self._logits[: arrays.num_seqs]
            if len(sampling) < arrays.num_seqs:
                logits = self._kernels.gather(logits, self._inputs.sampled_idx(len(sampling)))
            sampled = self._sample(plan, arrays, sampling, logits)
        else:
            hidden = self._compute_hidden(arrays, feeds, is_decode=key is not None)
            sampled = None
            if len(sampling):
                last_hidden = hidden
                if len(sampling) < arrays.num_tokens:
                    last_hidden = self._kernels.gather(
                        hidden, self._inputs.sampled_idx(len(sampling))
                    )
                logits = self._compute_logits(last_hidden)
                sampled = self._sample(plan, arrays, sampling, logits)
            for chunk in prompt_chunks(self._sequences, plan):
                prompts.append(self._launch_prompt_logprobs(chunk, hidden))
        step = _LaunchedStep(
            Mark(self._kernels.device),
            _Outputs(plan, sampling.tolist(), sampled, prompts),
            self._collect,
        )
        if self._decode_graphs is not None:
            self._decode_graphs.capture_wanted(self._prepare_decode)
        if self._piecewise_graphs is not None:
            self._piecewise_graphs.capture_wanted(self._prepare_padding)
        return step

    def _feeds(self, arrays: StepArrays, sampling: Ints) -> Feeds:
        return Feeds(
            self._rows.unknown_tokens(arrays),
            arrays.cu_seqlens[1:][sampling] - 1,
            arrays.rows[sampling].astype(np.int32),
        )

    def _graph_key(self, arrays: StepArrays) -> GraphKey | None:
        """None for steps that no graph of decodes is for."""
        if (
            self._decode_graphs is None
            or arrays.max_query_len > 1
            or self._sequences.prompt_logprobs
        ):
            return None
        return self._decode_graphs.key(arrays.num_seqs, arrays.max_seq_len)

    def _compute_hidden(self, arrays: StepArrays, feeds: Feeds, *, is_decode: bool) -> torch.Tensor:
        """Hidden states of a step, unpadded: in pieces, or kernel by kernel where there is no graph
        of its size yet and for decodes, which will have graphs of their own."""
        graphs = None if is_decode else self._piecewise_graphs
        size = None if graphs is None else graphs.size(arrays.num_tokens)
        if graphs and size and (graph := graphs.find(size)):
            self._decoder.reserve_positions(arrays.max_seq_len)
            self._inputs.fill(arrays, feeds, num_tokens=size)
            return graph.run(self._batch(arrays).groups, arrays.num_tokens)
        self._inputs.fill(arrays, feeds)
        return self._forward(self._batch(arrays))

    def _batch(self, arrays: StepArrays) -> ForwardBatch:
        """The inputs that were filled in, unpadded."""
        return self._inputs.batch(
            arrays.num_tokens, arrays.num_seqs, arrays.max_query_len, arrays.max_seq_len
        )

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of inputs that were filled in."""
        source_rows = self._inputs.source_rows(len(batch.token_ids))
        self._kernels.feed_tokens(batch.token_ids, source_rows, self._last_tokens)
        return self._decoder.forward(batch, self._kv.layers)

    def _run_decode(self, key: GraphKey) -> None:
        """What a graph launches: from the inputs to a row of logits for each sequence."""
        size = key.num_seqs
        hidden = self._forward(self._inputs.batch(size, size, 1, key.max_seq_len))
        self._decoder.compute_logits(hidden, self._logits[:size])

    def _prepare_decode(self, key: GraphKey) -> None:
        self._decoder.reserve_positions(key.max_seq_len)
        self._inputs.fill_padding(key.num_seqs)

    def _run_padding(self, num_tokens: int) -> torch.Tensor:
        """What graphs in pieces launch, between calls of attention: all on the number of tokens."""
        return self._forward(self._inputs.batch(num_tokens, 1, num_tokens, 1))

    def _prepare_padding(self, num_tokens: int) -> None:
        self._inputs.fill_padding(1, num_tokens)

    def _sample(
        self,
        plan: StepPlan,
        arrays: StepArrays,
        sampling: Ints,
        logits: torch.Tensor,
    ) -> Sampling | None:
        if not len(sampling):
            return None
        sampled = self._sampler.launch(logits, [plan.request_ids[i] for i in sampling.tolist()])
        rows = sampled.sampled
        assert isinstance(rows, DeviceSampledRows)
        targets = self._inputs.target_rows(len(sampling))
        self._kernels.store_tokens(rows, targets, self._last_tokens)
        self._rows.append_unknown_tokens(arrays.rows[sampling])
        return sampled

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of max_num_seqs rows at most; valid until the next call."""
        return self._decoder.compute_logits(hidden, self._logits[: hidden.shape[0]])

    def _launch_prompt_logprobs(self, chunk: PromptChunk, hidden: torch.Tensor) -> _PromptPart:
        rows = hidden[chunk.first : chunk.first + len(chunk.target_ids)]
        parts = []
        for begin in range(0, len(chunk.target_ids), len(self._logits)):
            targets = chunk.target_ids[begin : begin + len(self._logits)]
            logits = self._compute_logits(rows[begin : begin + len(targets)])
            parts.append(self._sampler.prompt_logprobs(logits, targets, chunk.num_logprobs))
        return _PromptPart(chunk, parts)

    def _collect(self, outputs: _Outputs) -> StepResult:
        """What a step gave that the device has done. May run in another thread than launch()."""
        results = [SeqResult()] * len(outputs.plan.request_ids)
        if outputs.sampled is not None:
            collected = self._sampler.collect(outputs.sampled)
            for index, result in zip(outputs.sampling, collected, strict=True):
                results[index] = result
        for part in outputs.prompts:
            entries: PromptLogprobs = [None] if part.chunk.is_first else []
            for rows in part.rows:
                entries += rows.result()
            results[part.chunk.index] = dataclasses.replace(
                results[part.chunk.index], prompt_logprobs=entries
            )
        return StepResult(results)


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Log-probabilities of a chunk's prompt tokens, on their way."""

    chunk: PromptChunk
    rows: list[PromptRows]


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What a step gives, on its way to the host. sampling: sequences of the plan that sample."""

    plan: StepPlan
    sampling: list[int]
    sampled: Sampling | None
    prompts: list[_PromptPart]


class _LaunchedStep:
    """A step that the device may still compute."""

    def __init__(
        self, mark: Mark, outputs: _Outputs, collect: Callable[[_Outputs], StepResult]
    ) -> None:
        mark.record()
        self._mark = mark
        self._outputs = outputs
        self._collect = collect
        self._lock = threading.Lock()  # results are collected once, whoever waits first
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return self._mark.has_passed

    def wait(self) -> StepResult:
        self._mark.wait()
        with self._lock:
            if self._result is None:
                self._result = self._collect(self._outputs)
            return self._result
