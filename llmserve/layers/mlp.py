"""The gated feed-forward block."""

from __future__ import annotations

import torch

from llmserve.kernels import Kernels
from llmserve.layers.linear import INTERMEDIATE, Linear
from llmserve.layers.scratch import Scratch


class MLP:
    """down(act(gate(x)) * up(x)); activation is "silu", "gelu_tanh" or "gelu"."""

    def __init__(
        self,
        kernels: Kernels,
        gate_up: Linear,
        down: Linear,
        activation: str,
        scratch: Scratch,
    ) -> None:
        self._kernels = kernels
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._scratch = scratch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; returns the same shape, in scratch memory."""
        gate_up = self.gate_up(x)
        activated = self._scratch.take(INTERMEDIATE, x.shape[0], self.down.num_cols)
        return self.down(self._kernels.act_mul(gate_up, self.activation, activated))
