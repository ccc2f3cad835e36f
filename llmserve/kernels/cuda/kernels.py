"""The CUDA kernels behind the interface. Nothing here waits for the device, but uploads of weights.

Products of many tokens are torch's, and so cuBLAS'; everything else is the compiled module's. Two
threads share it: one launches steps, the other reads what `result()` gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmserve.kernels.cuda import attention, elementwise, linear, sampling, write_kv
from llmserve.kernels.cuda.linear import DeviceWeights
from llmserve.kernels.cuda.packing import DeviceMatrix
from llmserve.kernels.cuda.transfer import WeightUploader, download, upload_bytes
from llmserve.kernels.interface import Cache, CompiledLayers, SampledTokens, StepInputs
from llmserve.kernels.layer_parameters import LayerParameters, NormParameters, RotaryParameters
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.kernels.reference_sampling import RowLogprobs
from llmserve.kernels.row_edit import RowEdit
from llmserve.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention, for any step whose queries lie in these tensors."""

    q: torch.Tensor  # [num_rows, num_heads, head_dim], at least as many rows as the step's
    out: torch.Tensor  # [num_rows, num_heads * head_dim]
    cache: Cache
    scale: float
    sliding_window: int | None
    logit_softcap: float | None


class CUDAKernels:
    """Activations are of `act_dtype`. In tests the device is the CPU and the module is emulated."""

    def __init__(self, module: Any, device: torch.device, act_dtype: torch.dtype) -> None:
        self.device = device
        self.act_dtype = act_dtype
        self._module = module
        self._uploader = WeightUploader(device)
        self._workspaces: dict[str, torch.Tensor] = {}
        # Graphs that were captured with a smaller workspace go on using it.
        self._outgrown: list[torch.Tensor] = []
        self._take_attention: Callable[[AttentionCall], None] | None = None

    def upload(self, weight: Weight | PackedWeight) -> DeviceMatrix:
        """Floats become those of the activations, as products are of one type."""
        matrix = linear.upload(weight, self.device, self._uploader.copy)
        if matrix.is_quantized or matrix.low.dtype == self.act_dtype:
            return matrix
        return dataclasses.replace(
            matrix,
            format=int(Weight.type_of(self.act_dtype)),
            low=matrix.low.to(self.act_dtype),
        )

    def upload_vector(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.to(self.device)

    def prepare_weights(
        self,
        weights: Sequence[Weight | PackedWeight | DeviceMatrix],
        biases: Sequence[torch.Tensor | None],
        *,
        is_output: bool = False,
    ) -> DeviceWeights:
        """All products are alike here: activations are not rounded."""
        matrices = [w if isinstance(w, DeviceMatrix) else self.upload(w) for w in weights]
        there = [None if bias is None else self.upload_vector(bias) for bias in biases]
        return DeviceWeights(matrices, there)

    def finish_uploads(self) -> None:
        self._uploader.finish()

    def compile_layers(self, layers: Iterable[LayerParameters]) -> CompiledLayers | None:
        return None

    def allocate_caches(
        self, num_caches: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(num_caches)]

    def embedding(
        self, token_ids: torch.Tensor, weight: DeviceMatrix, scale: float, out: torch.Tensor
    ) -> torch.Tensor:
        if not weight.is_quantized:
            return elementwise.embedding(self._module, token_ids, weight.low, scale, out)
        return torch.mul(linear.embedding(self._module, token_ids, weight), scale, out=out)

    def as_activations(self, residual: torch.Tensor) -> torch.Tensor:
        return residual.to(self.act_dtype)

    def stacked_linear(
        self, x: torch.Tensor, weights: DeviceWeights, out: torch.Tensor
    ) -> torch.Tensor:
        return linear.stacked_linear(self._module, x, weights, out)

    def rms_norm(
        self, x: torch.Tensor, norm: NormParameters, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return elementwise.rms_norm(self._module, x, norm, out=out, out_dtype=self.act_dtype)

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: NormParameters | None,
        norm: NormParameters | None,
        scale: float,
    ) -> torch.Tensor:
        return elementwise.add_norm(
            self._module, x, residual, post=post, norm=norm, scale=scale, out=x
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
        write_kv.rotate_and_write_kv(
            self._module,
            q,
            k,
            v,
            rotary=rotary,
            positions=None if rotary is None else inputs.positions,
            q_norm=q_norm,
            k_norm=k_norm,
            caches=(cache.k, cache.v),
            slot_mapping=inputs.slot_mapping,
            scales=cache.scales,
        )

    def act_mul(self, gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> torch.Tensor:
        return elementwise.act_mul(self._module, gate_up, activation, out)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return elementwise.softcap(self._module, x, cap)

    def block_copier(self, caches: Sequence[torch.Tensor]) -> elementwise.BlockCopier:
        return elementwise.BlockCopier(self._module, caches)

    def gather_rows(self, x: torch.Tensor, row_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        (ids,) = upload_bytes([torch.from_numpy(row_ids)], self.device)
        return self.gather(x, ids)

    def gather(self, x: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
        """Rows of x [num_rows, size]. row_ids: int64 [n] in the device's memory."""
        return elementwise.gather_rows(self._module, x, row_ids)

    def feed_tokens(
        self, token_ids: torch.Tensor, source_rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> None:
        """token_ids[i] = last_tokens[source_rows[i]] where that is not -1. int64, int32, int32."""
        elementwise.feed_tokens(self._module, token_ids, source_rows, last_tokens)

    def store_tokens(
        self, sampled: DeviceSampledRows, target_rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> None:
        """last_tokens[target_rows[i]] = the token of sampled row i. int32 all."""
        sampling.store_tokens(self._module, sampled.rows, target_rows, last_tokens)

    def edit_logits(self, logits: torch.Tensor, edits: Sequence[RowEdit]) -> None:
        packed = sampling.pack_edits(edits, logits.shape[1])
        rows, ids, values, words = upload_bytes(
            [
                torch.from_numpy(packed.rows.view(np.uint8).reshape(len(edits), -1)),
                torch.from_numpy(packed.ids),
                torch.from_numpy(packed.values),
                torch.from_numpy(packed.mask_words),
            ],
            self.device,
        )
        has_masks = words.numel() > 0
        sampling.edit_logits(self._module, logits, rows, ids, values, words if has_masks else None)

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: npt.NDArray[np.void],
        masks: Sequence[npt.NDArray[np.uint8] | None] | None = None,
    ) -> DeviceSampledRows:
        num_rows, vocab_size = logits.shape
        parts = [torch.from_numpy(params.view(np.uint8).reshape(num_rows, -1))]
        if masks is not None:
            parts += _masks(masks, vocab_size)
        uploaded = upload_bytes(parts, self.device)
        sampled = sampling.sample_rows(
            self._module,
            logits,
            uploaded[0],
            self._sampling_workspace(num_rows, vocab_size),
            stages=sampling.stages_of(self._module, params),
            masks=None if masks is None else sampling.Masks(*uploaded[1:]),
        )
        return DeviceSampledRows(sampled)

    def logprob_rows(
        self,
        logits: torch.Tensor,
        row_ids: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32] | SampledTokens,
        top_k: int,
    ) -> DeviceRowLogprobs:
        num_rows, vocab_size = len(row_ids), logits.shape[1]
        if isinstance(token_ids, SampledTokens):
            rows, token_rows = _upload_ids([row_ids, token_ids.rows], self.device)
            sampled = token_ids.sampled
            assert isinstance(sampled, DeviceSampledRows)
            tokens = sampling.sampled_token_ids(sampled.rows)
        else:
            rows, tokens = _upload_ids([row_ids, token_ids], self.device)
            token_rows = None
        workspace = sampling.logprob_workspace(
            self._module, num_rows, vocab_size, top_k, self.device
        )
        return DeviceRowLogprobs(
            sampling.logprob_rows(
                self._module,
                logits,
                tokens,
                top_k,
                workspace,
                row_ids=rows,
                token_rows=token_rows,
            )
        )

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
        if self._take_attention is not None:
            self._take_attention(AttentionCall(q, out, cache, scale, sliding_window, logit_softcap))
            return out
        num_bytes = self._module.attention_workspace_bytes(
            len(inputs.seq_lens), *q.shape[1:], inputs.max_seq_len, sliding_window or 0
        )
        return attention.paged_attention(
            self._module,
            q,
            cache.k,
            cache.v,
            inputs.block_tables,
            inputs.seq_lens,
            inputs.cu_seqlens_q,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            scale=scale,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            k_scale=None if cache.scales is None else cache.scales.k,
            v_scale=None if cache.scales is None else cache.scales.v,
            out=out,
            workspace=self._workspace("attention", num_bytes),
        )

    @contextmanager
    def attention_left_to(self, take: Callable[[AttentionCall], None]) -> Iterator[None]:
        """Meanwhile attention is not computed; `take` is given what compute_attention() needs."""
        self._take_attention = take
        try:
            yield
        finally:
            self._take_attention = None

    def compute_attention(
        self, call: AttentionCall, groups: Sequence[StepInputs], num_tokens: int
    ) -> None:
        """Fills the first rows of call.out. groups: of the step, one per KV cache group."""
        self.paged_attention(
            call.q[:num_tokens],
            call.cache,
            groups[call.cache.group_id],
            scale=call.scale,
            sliding_window=call.sliding_window,
            logit_softcap=call.logit_softcap,
            out=call.out[:num_tokens],
        )

    def _sampling_workspace(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        num_bytes = self._module.sampling_workspace_bytes(num_rows, vocab_size)
        return self._workspace("sampling", num_bytes)

    def _workspace(self, use: str, num_bytes: int) -> torch.Tensor:
        """uint8, at least so many bytes; zeros at first. One for all calls of a use."""
        workspace = self._workspaces.get(use)
        if workspace is None or workspace.numel() < num_bytes:
            if workspace is not None:
                self._outgrown.append(workspace)
            workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            self._workspaces[use] = workspace
        return workspace


class DeviceSampledRows:
    """`rows`: int32 [num_rows, 4] on the device, the bytes of SAMPLED_ROW."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._host = download(rows)

    def result(self) -> npt.NDArray[np.void]:
        return sampling.sampled_rows(self._host)


class DeviceRowLogprobs:
    """Log-probabilities on their way to the host."""

    def __init__(self, values: sampling.DeviceLogprobs) -> None:
        self._host = [download(tensor) for tensor in values]

    def result(self) -> RowLogprobs:
        return RowLogprobs(*(tensor.numpy() for tensor in self._host))


def _upload_ids(ids: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    return upload_bytes([torch.from_numpy(some) for some in ids], device)


def _masks(masks: Sequence[npt.NDArray[np.uint8] | None], vocab_size: int) -> list[torch.Tensor]:
    """Words and ids of sampling.Masks in the CPU's memory."""
    ids = np.full(len(masks), -1, np.int32)
    given = [row for row, mask in enumerate(masks) if mask is not None]
    ids[given] = np.arange(len(given))
    words = sampling.pack_masks([mask for mask in masks if mask is not None], vocab_size)
    return [torch.from_numpy(words), torch.from_numpy(ids)]
