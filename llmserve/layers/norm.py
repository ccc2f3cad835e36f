"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch

from llmserve.kernels import Kernels, NormParameters


class RMSNorm:
    """y = x / rms(x) * (weight_offset + weight), over the last dimension.

    weight: float32 [size]. Gemma stores weights around 0 and uses weight_offset 1.
    """

    def __init__(
        self, kernels: Kernels, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
    ) -> None:
        self._kernels = kernels
        self.parameters = NormParameters(weight, eps, weight_offset)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., size], activations or the residual stream, rows may be strided.

        Returns activations: `out` if given, else a new tensor.
        """
        return self._kernels.rms_norm(x, self.parameters, out)


class AddNorm:
    """One step of the residual stream: normalise what a block gave, add it, normalise the sum.

    Either norm may be absent: Llama has `pre` only (before the next block), OLMo 2 `post` only
    (after the last block), Gemma 2 and 3 have both. `scale` multiplies what is added (Granite).
    """

    def __init__(
        self, kernels: Kernels, post: RMSNorm | None, pre: RMSNorm | None, scale: float = 1.0
    ) -> None:
        self._kernels = kernels
        self.post = None if post is None else post.parameters
        self.pre = None if pre is None else pre.parameters
        self.scale = scale

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x: activations [num_tokens, hidden_size]; residual: float32; both change in place.

        Returns the input of the next block: x, or `residual` itself, so read it only.
        """
        return self._kernels.add_norm(x, residual, self.post, self.pre, self.scale)
