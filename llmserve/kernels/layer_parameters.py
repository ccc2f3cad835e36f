"""What a kernel has to know of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmserve.kernels.weight import StackedWeights


@dataclass(frozen=True, slots=True)
class NormParameters:
    """weight: float32 [size]. The norm multiplies with weight_offset + weight."""

    weight: torch.Tensor
    eps: float
    weight_offset: float


@dataclass(frozen=True, slots=True)
class RotaryParameters:
    """cos, sin: float32 [max_positions, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Weights and constants; None where the layer does not have the part.

    The norms' eps and offset are all equal.
    """

    qkv: StackedWeights
    output: StackedWeights
    gate_up: StackedWeights
    down: StackedWeights
    q_norm: NormParameters | None
    k_norm: NormParameters | None
    is_qk_norm_per_head: bool
    rotary: RotaryParameters | None
    post_attention_norm: NormParameters | None
    pre_mlp_norm: NormParameters | None
    post_mlp_norm: NormParameters | None
    next_norm: NormParameters | None  # the input norm of the next layer, or the model's last
    residual_scale: float
    activation: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    sliding_window: int | None
    logit_softcap: float | None

    @property
    def norms(self) -> list[NormParameters]:
        """Those that the layer has."""
        norms = (
            self.q_norm,
            self.k_norm,
            self.post_attention_norm,
            self.pre_mlp_norm,
            self.post_mlp_norm,
            self.next_norm,
        )
        return [norm for norm in norms if norm is not None]
