"""What layers, models and the runner need of a device: `Kernels`, with a class for each device.

Shapes and meanings are those of the CPU functions of the same name. Where those say float32, the
activations are of `act_dtype`; the residual stream, norm weights and logits are float32 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmserve.kernels.layer_parameters import LayerParameters, RotaryParameters
from llmserve.kernels.reference_sampling import RowLogprobs
from llmserve.kernels.weight import StackedWeights, Weight


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


class Cache(Protocol):
    """K and V of one layer, [num_blocks, block_size, num_kv_heads, head_dim] each."""

    @property
    def group_id(self) -> int: ...
    @property
    def k(self) -> torch.Tensor: ...
    @property
    def v(self) -> torch.Tensor: ...


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


class Kernels(Protocol):
    """One device's kernels. Tensors that go in and come out lie in its memory."""

    @property
    def device(self) -> torch.device: ...

    @property
    def act_dtype(self) -> torch.dtype:
        """Of the activations between two kernels."""
        ...

    def upload(self, weight: Weight) -> Weight:
        """The matrix in the device's memory; itself where it is there already."""
        ...

    def upload_vector(self, vector: torch.Tensor) -> torch.Tensor:
        """A float32 vector in the device's memory."""
        ...

    def prepare_weights(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
    ) -> StackedWeights:
        """Matrices that one product multiplies with, uploaded and in the form it reads them."""
        ...

    def compile_layers(self, layers: Iterable[LayerParameters]) -> CompiledLayers | None:
        """None where layers run kernel by kernel."""
        ...

    def allocate_caches(
        self, num_caches: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """KV cache tensors with arbitrary content."""
        ...

    def embedding(self, token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """A new residual stream, float32 [num_tokens, num_cols]."""
        ...

    def as_activations(self, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream as the input of a product; may be `residual` itself."""
        ...

    def stacked_linear(
        self, x: torch.Tensor, weights: StackedWeights, out: torch.Tensor
    ) -> torch.Tensor:
        """out: of act_dtype, or float32 for logits."""
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        weight_offset: float = 0.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: activations or the residual stream. Returns activations."""
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        weight_offset: float = 0.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def rotate_and_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryParameters | None,
        cache: Cache,
        inputs: StepInputs,
    ) -> None:
        """Rotates q and k, q in place and k perhaps only on its way into the cache; stores K, V."""
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

    def copy_blocks(self, cache: torch.Tensor, block_copies: list[tuple[int, int]]) -> None: ...

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: npt.NDArray[np.void],
        masks: Sequence[npt.NDArray[np.uint8] | None] | None = None,
    ) -> npt.NDArray[np.void]: ...

    def logprob_rows(
        self,
        logits: torch.Tensor,
        row_ids: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        top_k: int,
    ) -> RowLogprobs: ...
