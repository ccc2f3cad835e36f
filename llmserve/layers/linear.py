"""A linear layer over one or several stored matrices.

Files that keep q, k and v (or gate and up) apart stay as they are in the CPU's memory: joining them
would copy a mapped file. One call multiplies with all of them, and their products lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmserve.kernels import Kernels, Matrix, Weight
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.layers.scratch import Scratch

# The role of what is between two products of a layer.
INTERMEDIATE = "intermediate"


class Linear:
    """y = x @ weight.T + bias, where `weight` is its parts stacked row-wise.

    biases: float32 [num_rows] of the part, or None, one per part. The result lies in `scratch`,
    under `role`.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[Weight | PackedWeight | Matrix],
        biases: Sequence[torch.Tensor | None],
        scratch: Scratch,
        role: str,
        *,
        is_output: bool = False,
    ) -> None:
        """is_output: the result is logits, which no other layer reads."""
        self._kernels = kernels
        self.weights = kernels.prepare_weights(weights, biases, is_output=is_output)
        self._scratch = scratch
        self._role = role
        self.num_cols: int = self.weights.num_cols
        self.num_rows: int = self.weights.num_rows

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: activations [num_tokens, num_cols]; returns [num_tokens, num_rows], contiguous:
        `out` if given, else activations in the scratch memory."""
        if out is None:
            out = self._scratch.take(self._role, x.shape[0], self.num_rows)
        return self._kernels.stacked_linear(x, self.weights, out)
