"""A linear layer over one or several stored matrices.

Files that keep q, k and v (or gate and up) apart stay as they are: joining them would copy a mapped
file into memory. Their products land side by side in one buffer instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmserve import kernels
from llmserve.kernels import Weight
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
        weights: Sequence[Weight],
        biases: Sequence[torch.Tensor | None] | None,
        scratch: Scratch,
        role: str,
    ) -> None:
        self._parts = list(zip(weights, biases or [None] * len(weights), strict=True))
        self._part_sizes = [weight.num_rows for weight in weights]
        self._scratch = scratch
        self._role = role
        self.num_cols = weights[0].num_cols
        self.num_rows = sum(self._part_sizes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: float32 [num_tokens, num_cols]; returns float32 [num_tokens, num_rows], contiguous:
        `out` if given, else in the scratch memory."""
        num_tokens = x.shape[0]
        if out is None:
            out = self._scratch.take(self._role, num_tokens, self.num_rows)
        if len(self._parts) == 1:
            weight, bias = self._parts[0]
            return kernels.linear(x, weight, bias, out)
        for (weight, bias), part in zip(
            self._parts, out.split_with_sizes(self._part_sizes, 1), strict=True
        ):
            # The kernel writes contiguous rows: those of a part are, if there is only one.
            if num_tokens == 1:
                kernels.linear(x, weight, bias, part)
                continue
            rows = self._scratch.take(INTERMEDIATE, num_tokens, weight.num_rows)
            part.copy_(kernels.linear(x, weight, bias, rows))
        return out
