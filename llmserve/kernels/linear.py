"""Products with weight matrices in their storage type, and rows of such matrices.

This module checks; the compiled extension computes. For quantised types the activations are
quantised to 16 bits in groups of 32 as well, the products of a group are summed as exact integers,
and the groups are summed in float32 in the order of the columns. So a row of the result has the
same bits alone or among any others, on any number of threads.
"""

from __future__ import annotations

import torch

from llmserve import _cpu_kernels
from llmserve.kernels.checks import check, output
from llmserve.kernels.weight import StackedWeights, Weight


def _check_weight(weight: Weight) -> None:
    check("weight.data", weight.data, torch.uint8, tuple(weight.data.shape))


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias.

    x: float32 [num_tokens, num_cols]; bias: float32 [num_rows]; all contiguous.
    Returns float32 [num_tokens, num_rows]: `out` if given (it may not overlap x), else a new
    tensor. Columns of quantised types come in groups of 32; num_cols of the others is free.
    Raises ValueError for a wrong dtype, shape, layout or device.
    """
    return stacked_linear(x, StackedWeights([weight], [bias]), out)


def stacked_linear(
    x: torch.Tensor, weights: StackedWeights, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` with all of the stacked matrices: x is quantised once."""
    if x.dim() != 2:
        raise ValueError(f"x must have the shape [num_tokens, num_cols], not {tuple(x.shape)}")
    num_tokens = x.shape[0]
    check("x", x, torch.float32, (num_tokens, weights.num_cols))
    if weights.device.type != "cpu":
        raise ValueError(f"weights must lie in CPU memory, not on {weights.device}")
    out = output(out, (num_tokens, weights.num_rows))
    table = weights.table
    _cpu_kernels.linear(x.data_ptr(), table.data_ptr(), len(table), out.data_ptr(), num_tokens)
    return out


def embedding(
    token_ids: torch.Tensor,
    weight: Weight,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of the matrix times `scale`, in float32.

    token_ids: int64 [num_tokens], contiguous, each in [0, num_rows).
    Returns float32 [num_tokens, num_cols]: `out` if given, else a new tensor. Raises ValueError for
    a wrong dtype, shape, layout or device and IndexError for an id outside the matrix.
    """
    check("token_ids", token_ids, torch.int64, (token_ids.numel(),))
    _check_weight(weight)
    out = output(out, (token_ids.numel(), weight.num_cols))
    _cpu_kernels.embedding(
        token_ids.data_ptr(),
        weight.data.data_ptr(),
        weight.layout,
        scale,
        out.data_ptr(),
        token_ids.numel(),
        weight.num_rows,
        weight.num_cols,
    )
    return out


def dequantize(weight: Weight) -> torch.Tensor:
    """The matrix as float32 [num_rows, num_cols], with the values that ggml defines."""
    _check_weight(weight)
    out = torch.empty(weight.num_rows, weight.num_cols)
    _cpu_kernels.dequantize(
        weight.data.data_ptr(),
        weight.layout,
        out.data_ptr(),
        weight.num_rows,
        weight.num_cols,
    )
    return out
