"""What layers, models and the runner need of a device: `Kernels`, with a class for each device.

Shapes and meanings are those of the CPU functions of the same name. Where those say float32, the
activations are of `act_dtype`; the residual stream, norm weights and logits are float32 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from llmserve.kernels.layer_parameters import LayerParameters, NormParameters, RotaryParameters
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.kernels.reference_sampling import RowLogprobs
from llmserve.kernels.row_edit import RowEdit
from llmserve.kernels.weight import Weight

# What `upload` and `prepare_weights` give: for the kernels that gave it, opaque to all others.
Matrix: TypeAlias = Any
PreparedWeights: TypeAlias = Any


class StepInputs(Protocol):
    """A step's tokens as one KV cache group sees them; shapes as in `paged_attention`."""

    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...
    @property
    def block_tables(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def cu_seqlens_q(self) -> torch.Tensor: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


class KVScales(NamedTuple):
    """What K and V are divided by on their way into a cache of fp8: float32 [num_kv_heads] each."""

    k: torch.Tensor
    v: torch.Tensor


class Cache(Protocol):
    """K and V of one layer, [num_blocks, block_size, num_kv_heads, head_dim] each.

    `scales` are None where values are stored as they are, as on the CPU.
    """

    @property
    def group_id(self) -> int: ...
    @property
    def k(self) -> torch.Tensor: ...
    @property
    def v(self) -> torch.Tensor: ...
    @property
    def scales(self) -> KVScales | None: ...


class CompiledLayers(Protocol):
    """All layers of a decoder in one call."""

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        groups: Sequence[StepInputs],
        caches: Sequence[Cache],
        *,
        qkv: torch.Tensor,
        intermediate: torch.Tensor,
        attention_out: torch.Tensor,
        gate_up: torch.Tensor,
        mlp_out: torch.Tensor,
    ) -> torch.Tensor:
        """As DecoderLayers.run of the CPU."""
        ...


class BlockCopier(Protocol):
    """Copies blocks of the caches that it was made for."""

    def copy(self, block_copies: Sequence[tuple[int, int]]) -> None:
        """Whole blocks, (source, target) pair after pair. IndexError for one that is not there."""
        ...


class SampledRows(Protocol):
    """One token per row of logits, which may not be known yet."""

    def result(self) -> npt.NDArray[np.void]:
        """SAMPLED_ROW [num_rows]. May be called once the device has got this far."""
        ...


class SampledTokens(NamedTuple):
    """The tokens of some rows; those of rows without a token are arbitrary."""

    sampled: SampledRows
    rows: npt.NDArray[np.int32]


class PendingLogprobs(Protocol):
    """Log-probabilities that may not be known yet."""

    def result(self) -> RowLogprobs:
        """May be called once the device has got this far."""
        ...


class Kernels(Protocol):
    """One device's kernels. Tensors that go in and come out lie in its memory."""

    @property
    def device(self) -> torch.device: ...

    @property
    def act_dtype(self) -> torch.dtype:
        """Of the activations between two kernels."""
        ...

    def upload(self, weight: Weight | PackedWeight) -> Matrix:
        """The matrix in the device's memory, in the form in which kernels read it."""
        ...

    def upload_vector(self, vector: torch.Tensor) -> torch.Tensor:
        """A float32 vector in the device's memory."""
        ...

    def prepare_weights(
        self,
        weights: Sequence[Weight | PackedWeight | Matrix],
        biases: Sequence[torch.Tensor | None],
        *,
        is_output: bool = False,
    ) -> PreparedWeights:
        """Matrices one below the other, for products. What is not uploaded yet is now.

        is_output: the products are logits, which no other layer multiplies again. The result has
        num_rows and num_cols.
        """
        ...

    def finish_uploads(self) -> None:
        """Blocks until all weights are in the device's memory."""
        ...

    def compile_layers(self, layers: Iterable[LayerParameters]) -> CompiledLayers | None:
        """None where layers run kernel by kernel."""
        ...

    def allocate_caches(
        self, num_caches: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """KV cache tensors with arbitrary content."""
        ...

    def embedding(
        self, token_ids: torch.Tensor, weight: Matrix, scale: float, out: torch.Tensor
    ) -> torch.Tensor:
        """out: float32 [num_tokens, num_cols], rows times `scale`."""
        ...

    def as_activations(self, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream as the input of a product; may be `residual` itself."""
        ...

    def stacked_linear(
        self, x: torch.Tensor, weights: PreparedWeights, out: torch.Tensor
    ) -> torch.Tensor:
        """out: of act_dtype, or float32 for logits."""
        ...

    def rms_norm(
        self, x: torch.Tensor, norm: NormParameters, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: activations or the residual stream, [..., size], rows may be strided.

        Returns activations: `out` or a new tensor.
        """
        ...

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: NormParameters | None,
        norm: NormParameters | None,
        scale: float,
    ) -> torch.Tensor:
        """residual += scale * post(x), in place; returns norm(residual) as activations.

        x: activations [num_tokens, size]; is overwritten, and may be what is returned, as may
        `residual`. A norm that is None leaves its argument as it is.
        """
        ...

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
        """Normalises each head of q and k, rotates them, and stores K and V in the cache.

        q: [num_tokens, num_heads, head_dim], changed in place; k, v: with num_kv_heads, undefined
        afterwards. Tokens and heads may be strided.
        """
        ...

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
    ) -> torch.Tensor: ...

    def act_mul(
        self, gate_up: torch.Tensor, activation: str, out: torch.Tensor
    ) -> torch.Tensor: ...

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor: ...

    def block_copier(self, caches: Sequence[torch.Tensor]) -> BlockCopier:
        """For KV cache tensors of one shape."""
        ...

    def gather_rows(self, x: torch.Tensor, row_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """Rows of x [num_rows, size], as a new tensor."""
        ...

    def edit_logits(self, logits: torch.Tensor, edits: Sequence[RowEdit]) -> None:
        """In place; at most one edit of a row."""
        ...

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: npt.NDArray[np.void],
        masks: Sequence[npt.NDArray[np.uint8] | None] | None = None,
    ) -> SampledRows: ...

    def logprob_rows(
        self,
        logits: torch.Tensor,
        row_ids: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32] | SampledTokens,
        top_k: int,
    ) -> PendingLogprobs:
        """The logits may be overwritten after the call."""
        ...
