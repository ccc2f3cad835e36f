"""The gated feed-forward block."""

from __future__ import annotations

import torch

from llmserve import kernels
from llmserve.layers.linear import Linear


class MLP:
    """down(act(gate(x)) * up(x)); activation is "silu", "gelu_tanh" or "gelu"."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [num_tokens, hidden_size]; returns the same shape."""
        return self._down(kernels.act_mul(self._gate_up(x), self._activation))
