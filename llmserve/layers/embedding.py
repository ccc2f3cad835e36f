"""The table of token embeddings."""

from __future__ import annotations

import torch

from llmserve.kernels import Kernels, Matrix


class Embedding:
    """Rows of `weight` times `scale`."""

    def __init__(self, kernels: Kernels, weight: Matrix, scale: float = 1.0) -> None:
        self._kernels = kernels
        self.weight = weight
        self._scale = scale

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [num_tokens]; returns `out`, float32 [num_tokens, hidden_size]."""
        return self._kernels.embedding(token_ids, self.weight, self._scale, out)
