"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its context extensions.

A table holds cos and sin per position. It is filled as positions come up, in chunks of a fixed
shape, so that a value depends on its position alone and memory grows with use.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from llmserve.kernels import RotaryParameters

_CHUNK = 1024  # positions


class RopeKind(enum.Enum):
    """How frequencies are changed for contexts longer than the first training's."""

    DEFAULT = "default"
    LINEAR = "linear"  # positions divided by `factor`
    DYNAMIC = "dynamic"  # base grown with the context (NTK-aware)
    YARN = "yarn"  # Peng et al. 2023, arXiv 2309.00071
    LLAMA3 = "llama3"  # as Llama 3.1: long wavelengths divided, a smooth transition
    LONGROPE = "longrope"  # Ding et al. 2024, arXiv 2402.13753: a factor per dimension


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of layer's rotary embedding. Lengths in tokens."""

    theta: float
    rotary_dim: int
    max_position: int  # context that the model was made for
    kind: RopeKind = RopeKind.DEFAULT
    is_interleaved: bool = False  # pairs are neighbours, not halves
    factor: float = 1.0
    original_max_position: int = 0  # context before scaling
    attention_factor: float | None = None  # on cos and sin; None: the kind's formula
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """float32 [rotary_dim / 2] radians per position, and the factor on cos and sin.

    Kinds that depend on the length of the sequence take `max_model_len` for it: a position must
    not change its angle while a sequence grows, or cached keys would be wrong.
    """
    if rope.kind is RopeKind.DYNAMIC:
        return 1.0 / _powers(rope, _dynamic_base(rope, max_model_len)), 1.0
    inv_freq = 1.0 / _powers(rope, rope.theta)
    if rope.kind is RopeKind.LINEAR:
        return inv_freq / rope.factor, 1.0
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, inv_freq), _yarn_attention_factor(rope)
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, inv_freq), 1.0
    if rope.kind is RopeKind.LONGROPE:
        is_long = max_model_len > rope.original_max_position
        factors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
        return 1.0 / (factors * _powers(rope, rope.theta)), _longrope_attention_factor(rope)
    return inv_freq, 1.0


def _powers(rope: RopeConfig, base: float) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return base**exponents


def _dynamic_base(rope: RopeConfig, max_model_len: int) -> float:
    stretch = max(max_model_len, rope.max_position) / rope.max_position
    growth = rope.factor * stretch - (rope.factor - 1)
    return float(rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, slow ones are interpolated."""

    def dimension(num_turns: float) -> float:
        turns = rope.original_max_position / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = max(high - low, 0.001)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    share = ((steps - low) / width).clamp(0, 1)
    return inv_freq / rope.factor * share + inv_freq * (1 - share)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    turns = rope.original_max_position * inv_freq / (2 * math.pi)  # within the first context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inv_freq / rope.factor + share * inv_freq


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


class RotaryTable:
    """cos and sin in the memory of `device`, float32 [max_model_len rounded up, rotary_dim / 2]."""

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device) -> None:
        num_rows = -(-max_model_len // _CHUNK) * _CHUNK
        self._inv_freq, self._attention_factor = inverse_frequencies(rope, max_model_len)
        self.parameters = RotaryParameters(
            torch.empty(num_rows, rope.rotary_dim // 2, device=device),
            torch.empty(num_rows, rope.rotary_dim // 2, device=device),
            rope.is_interleaved,
        )
        self._num_filled = 0

    def reserve(self, num_positions: int) -> None:
        """Makes positions 0 .. num_positions - 1 usable."""
        while self._num_filled < num_positions:
            begin, end = self._num_filled, self._num_filled + _CHUNK
            angles = torch.arange(begin, end, dtype=torch.float32)[:, None] * self._inv_freq
            self.parameters.cos[begin:end] = angles.cos() * self._attention_factor
            self.parameters.sin[begin:end] = angles.sin() * self._attention_factor
            self._num_filled = end
