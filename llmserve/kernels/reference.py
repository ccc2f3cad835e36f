"""Every kernel in plain torch: what runs without the compiled extension, and what it has to match.

Written to be read, not to be fast.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from llmserve.kernels.weight import GGMLType, StackedWeights, Weight


def get_num_threads() -> int:
    return torch.get_num_threads()


def set_num_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)


def _dequantize_rows(data: torch.Tensor, type: GGMLType) -> torch.Tensor:
    rows = np.ascontiguousarray(data.numpy())
    values = gguf_dequantize(rows, GGMLQuantizationType(int(type)))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def dequantize(weight: Weight) -> torch.Tensor:
    """The matrix as float32 [num_rows, num_cols]."""
    return _dequantize_rows(weight.data, weight.type)


def embedding(
    token_ids: torch.Tensor,
    weight: Weight,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows `token_ids` (int64 [num_tokens]) times `scale`, float32 [num_tokens, num_cols]."""
    if token_ids.numel() == 0:
        return torch.empty(0, weight.num_cols) if out is None else out
    rows = _dequantize_rows(weight.data[token_ids], weight.type) * scale
    return rows if out is None else out.copy_(rows)


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [num_tokens, num_cols] @ weight.T + bias, float32 [num_tokens, num_rows]."""
    result = torch.nn.functional.linear(x, dequantize(weight), bias)
    return result if out is None else out.copy_(result)


def stacked_linear(
    x: torch.Tensor, weights: StackedWeights, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The products with each of the stacked matrices, side by side."""
    result = torch.cat([linear(x, weight, bias) for weight, bias in weights.parts], dim=1)
    return result if out is None else out.copy_(result)
