"""The CPU's kernels behind the interface."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from llmserve.kernels import cpu_functions
from llmserve.kernels.huge_pages import HugePages
from llmserve.kernels.interface import (
    BlockCopier,
    Cache,
    CompiledLayers,
    PendingLogprobs,
    SampledRows,
    SampledTokens,
    StepInputs,
)
from llmserve.kernels.layer_parameters import LayerParameters, NormParameters, RotaryParameters
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.kernels.reference_sampling import STATUS_OK
from llmserve.kernels.repack import as_ggml
from llmserve.kernels.row_edit import RowEdit, edit_row
from llmserve.kernels.weight import StackedWeights, Weight

if cpu_functions.HAS_EXT:
    from llmserve.kernels.decoder_layers import DecoderLayers

T = TypeVar("T")


class CPUKernels:
    """Activations are float32; weights stay where they are, in the form that the file has."""

    device = torch.device("cpu")
    act_dtype = torch.float32

    stacked_linear = staticmethod(cpu_functions.stacked_linear)
    act_mul = staticmethod(cpu_functions.act_mul)
    softcap = staticmethod(cpu_functions.softcap)

    def upload(self, weight: Weight | PackedWeight) -> Weight:
        return weight if isinstance(weight, Weight) else as_ggml(weight)

    def upload_vector(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    def prepare_weights(
        self,
        weights: Sequence[Weight | PackedWeight],
        biases: Sequence[torch.Tensor | None],
        *,
        is_output: bool = False,
    ) -> StackedWeights:
        uploaded = [self.upload(weight) for weight in weights]
        return StackedWeights(uploaded, biases, activation_bits=8 if is_output else 16)

    def finish_uploads(self) -> None:
        """Nothing is uploaded."""

    def compile_layers(self, layers: Iterable[LayerParameters]) -> CompiledLayers | None:
        return DecoderLayers(layers) if cpu_functions.HAS_EXT else None

    def allocate_caches(
        self, num_caches: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """In huge pages. Memory is taken from the system when a block is first written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = HugePages(num_caches * HugePages.size_of(num_bytes))
        return [memory.take(num_bytes).view(dtype).view(shape) for _ in range(num_caches)]

    def embedding(
        self, token_ids: torch.Tensor, weight: Weight, scale: float, out: torch.Tensor
    ) -> torch.Tensor:
        return cpu_functions.embedding(token_ids, weight, scale, out)

    def as_activations(self, residual: torch.Tensor) -> torch.Tensor:
        return residual

    def rms_norm(
        self, x: torch.Tensor, norm: NormParameters, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return cpu_functions.rms_norm(
            x, norm.weight, norm.eps, weight_offset=norm.weight_offset, out=out
        )

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: NormParameters | None,
        norm: NormParameters | None,
        scale: float,
    ) -> torch.Tensor:
        if post is not None:
            x = self.rms_norm(x, post, out=x)
        if scale != 1.0:
            x.mul_(scale)
        if norm is None:
            return residual.add_(x)
        return cpu_functions.add_rms_norm(
            x, residual, norm.weight, norm.eps, weight_offset=norm.weight_offset, out=x
        )

    def rotate_and_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_norm: NormParameters | None,
        k_norm: NormParameters | None,
        rotary: RotaryParameters | None,
        cache: Cache,
        inputs: StepInputs,
    ) -> None:
        for heads, norm in ((q, q_norm), (k, k_norm)):
            if norm is not None:
                self.rms_norm(heads, norm, out=heads)
        if rotary is not None:
            cpu_functions.rotary(
                q,
                k,
                inputs.positions,
                rotary.cos,
                rotary.sin,
                is_interleaved=rotary.is_interleaved,
            )
        cpu_functions.write_kv(k, v, cache.k, cache.v, inputs.slot_mapping)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: Cache,
        inputs: StepInputs,
        *,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return cpu_functions.paged_attention(
            q,
            cache.k,
            cache.v,
            inputs.block_tables,
            inputs.seq_lens,
            inputs.cu_seqlens_q,
            scale=scale,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            out=out,
        )

    def block_copier(self, caches: Sequence[torch.Tensor]) -> BlockCopier:
        return _BlockCopier(caches)

    def gather_rows(self, x: torch.Tensor, row_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        return x[torch.from_numpy(row_ids)]

    def edit_logits(self, logits: torch.Tensor, edits: Sequence[RowEdit]) -> None:
        for edit in edits:
            edit_row(logits[edit.row].numpy(), edit)

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: npt.NDArray[np.void],
        masks: Sequence[npt.NDArray[np.uint8] | None] | None = None,
    ) -> SampledRows:
        return _Known(cpu_functions.sample_rows(logits, params, masks))

    def logprob_rows(
        self,
        logits: torch.Tensor,
        row_ids: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32] | SampledTokens,
        top_k: int,
    ) -> PendingLogprobs:
        if isinstance(token_ids, SampledTokens):
            sampled = token_ids.sampled.result()[token_ids.rows]
            token_ids = np.where(sampled["status"] == STATUS_OK, sampled["token_id"], np.int32(0))
        return _Known(cpu_functions.logprob_rows(logits, row_ids, token_ids, top_k))


class _BlockCopier:
    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._caches = list(caches)

    def copy(self, block_copies: Sequence[tuple[int, int]]) -> None:
        for cache in self._caches:
            cpu_functions.copy_blocks(cache, list(block_copies))


class _Known(Generic[T]):
    """What was computed at once."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        return self._value
