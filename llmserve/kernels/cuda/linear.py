"""Products with weight matrices in their storage type, and rows of such matrices, on the device.

Few tokens: one kernel reads the weights once in their storage type and multiplies on tensor cores;
a token's result has the same bits alone or among others. Many tokens: the matrix becomes floats of
the activations' type, a slice of rows at a time, and torch multiplies. Which one it is depends on
the number of tokens and the format alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llmserve.core.ggml import GGMLType
from llmserve.errors import StartupError
from llmserve.kernels.checks import describe
from llmserve.kernels.cuda.checks import check, stream_of
from llmserve.kernels.cuda.packing import (
    FP8_ROW,
    INT8_ROW,
    DeviceMatrix,
    pack_checkpoint_weight,
    pack_weight,
)
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.kernels.weight import Weight

# A slice of a matrix as floats, small enough to stay in the second-level cache of large devices
# until the product has read it.
_WORKSPACE_BYTES = 32 << 20
_RUN = 8  # columns come in multiples of it, so that rows begin at 16 bytes
_TYPES = {
    torch.float32: int(GGMLType.F32),
    torch.float16: int(GGMLType.F16),
    torch.bfloat16: int(GGMLType.BF16),
}
_EIGHT_BITS = frozenset((int(GGMLType.Q8_0), INT8_ROW, FP8_ROW))
_Part = tuple[DeviceMatrix, torch.Tensor | None]


def max_kernel_tokens(matrix: DeviceMatrix, dtype: torch.dtype) -> int:
    """The largest number of tokens of a dtype for which a kernel multiplies with the matrix.

    By the bytes that move: the kernel reads a quantised matrix once for each 16 tokens; the other
    way reads it once, writes it as floats of 16 bits and reads those.
    """
    if matrix.num_cols % _RUN:
        return 0
    if not matrix.is_quantized or dtype == torch.float32:
        return 8
    return 16 if matrix.format in _EIGHT_BITS else 32


class DeviceWeights:
    """Matrices one below the other, with the same columns, and a bias for each or None.

    biases: float32 [num_rows] of the matrix. Floats of one type are joined, as torch multiplies
    them in one go. Raises ValueError for what does not fit together.
    """

    def __init__(
        self, matrices: Sequence[DeviceMatrix], biases: Sequence[torch.Tensor | None]
    ) -> None:
        self.num_cols = matrices[0].num_cols
        self.num_rows = sum(matrix.num_rows for matrix in matrices)
        self.device = matrices[0].low.device
        for matrix, bias in zip(matrices, biases, strict=True):
            if matrix.num_cols != self.num_cols:
                raise ValueError(f"{matrix.num_cols} columns do not stack on {self.num_cols}")
            if bias is not None:
                check("bias", bias, torch.float32, (matrix.num_rows,), self.device)
        self.parts = _join(list(zip(matrices, biases, strict=True)))
        self.max_kernel_tokens = {
            dtype: min(max_kernel_tokens(matrix, dtype) for matrix, _ in self.parts)
            for dtype in _TYPES
        }
        self.runs = _runs(self.parts)


class _Run:
    """Neighbouring parts that are multiplied with the same order of the activations."""

    def __init__(self, parts: Sequence[_Part], first_row: int) -> None:
        self.first_row = first_row
        self.num_rows = sum(matrix.num_rows for matrix, _ in parts)
        self.column_order = parts[0][0].column_order
        # Read by the launcher, on the host, while it is called.
        self.table = np.array([_words(matrix, bias) for matrix, bias in parts], np.int64)
        self.address = self.table.ctypes.data


def upload(
    weight: Weight | PackedWeight,
    device: torch.device,
    copy: Callable[[torch.Tensor, torch.Tensor], None],
) -> DeviceMatrix:
    """The matrix on the device, in its layout. copy(target, source) brings bytes there;
    those of a matrix that is there already stay.

    Raises StartupError for groups or tiles of a checkpoint that no format holds.
    """
    if not isinstance(weight, Weight):
        try:
            return pack_checkpoint_weight(weight.to(device))
        except ValueError as error:
            raise StartupError(f"a quantised matrix has no form on this device: {error}") from error
    if weight.is_packed:
        raise ValueError("the matrix is packed for the CPU")
    if weight.data.is_cuda:
        return pack_weight(weight)
    raw = torch.empty(weight.data.shape, dtype=torch.uint8, device=device)
    copy(raw, weight.data)
    return pack_weight(Weight(raw, weight.type, weight.num_rows, weight.num_cols))


def stacked_linear(
    module: Any, x: torch.Tensor, weights: DeviceWeights, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias for all of the stacked matrices.

    x: float32, float16 or bfloat16 [num_tokens, num_cols], contiguous. Returns
    [num_tokens, num_rows]: `out` if given (of x's type or float32, contiguous, apart from x), else
    a new tensor of x's type. Raises ValueError for a wrong dtype, shape, layout or device.
    """
    num_tokens = x.shape[0]
    if x.dtype not in _TYPES:
        raise ValueError(f"x must be of floats, not {describe(x)}")
    check("x", x, x.dtype, (num_tokens, weights.num_cols), weights.device)
    shape = (num_tokens, weights.num_rows)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out must be of {x.dtype} or float32, not {describe(out)}")
    check("out", out, out.dtype, shape, weights.device)
    if num_tokens > weights.max_kernel_tokens[x.dtype]:
        _multiply_floats(module, x, weights, out)
    elif len(weights.runs) == 1:
        _multiply_run(module, x, weights.runs[0], out)
    else:
        for run in weights.runs:
            part = out.new_empty((num_tokens, run.num_rows))
            _multiply_run(module, x, run, part)
            out[:, run.first_row : run.first_row + run.num_rows].copy_(part)
    return out


def embedding(module: Any, token_ids: torch.Tensor, matrix: DeviceMatrix) -> torch.Tensor:
    """Rows of the matrix, in float32.

    token_ids: int64 [num_tokens], contiguous. Returns float32 [num_tokens, num_cols]. The row of an
    id outside of a quantised matrix is zeros, as the device cannot refuse it.
    """
    device = matrix.low.device
    check("token_ids", token_ids, torch.int64, (token_ids.numel(),), device)
    if not matrix.is_quantized:
        return matrix.low.index_select(0, token_ids).float()
    rows = torch.empty((len(token_ids), matrix.num_cols), dtype=torch.float32, device=device)
    _decode_rows(module, matrix, rows, token_ids.data_ptr(), 0)
    return _input_order(matrix, rows)


def dequantize(
    module: Any, matrix: DeviceMatrix, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The matrix as floats [num_rows, num_cols] of a dtype, rounded to it once."""
    return _input_order(matrix, _floats(module, matrix, 0, matrix.num_rows, dtype))


def _multiply_run(module: Any, x: torch.Tensor, run: _Run, out: torch.Tensor) -> None:
    """out [num_tokens, rows of the run], by the kernel."""
    ordered = x if run.column_order is None else x[:, run.column_order]
    module.linear(
        run.address,
        len(run.table),
        ordered.data_ptr(),
        _TYPES[x.dtype],
        out.data_ptr(),
        _TYPES[out.dtype],
        *x.shape,
        stream_of(x),
    )


def _multiply_floats(
    module: Any, x: torch.Tensor, weights: DeviceWeights, out: torch.Tensor
) -> None:
    """By torch, a slice of rows at a time where they need decoding."""
    first = 0
    for matrix, bias in weights.parts:
        ordered = x if matrix.column_order is None else x[:, matrix.column_order]
        step = matrix.num_rows
        if matrix.low.dtype != x.dtype:
            step = max(1, _WORKSPACE_BYTES // (matrix.num_cols * x.element_size()))
        for begin in range(0, matrix.num_rows, step):
            values = _floats(module, matrix, begin, min(step, matrix.num_rows - begin), x.dtype)
            _matmul(ordered, values, out[:, first + begin : first + begin + len(values)])
        if bias is not None:
            out[:, first : first + matrix.num_rows] += bias
        first += matrix.num_rows


def _matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x @ weight.T, summed in float32 and rounded once to the type of `out`."""
    if out.dtype == x.dtype:
        torch.matmul(x, weight.T, out=out)
    elif x.is_cuda:
        out.copy_(torch.mm(x, weight.T, out_dtype=out.dtype))
    else:
        out.copy_(x.to(out.dtype) @ weight.T.to(out.dtype))


def _floats(
    module: Any, matrix: DeviceMatrix, first_row: int, num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Some rows as floats of a dtype, columns in the stored order."""
    if not matrix.is_quantized:
        return matrix.low[first_row : first_row + num_rows].to(dtype)
    rows = torch.empty((num_rows, matrix.num_cols), dtype=dtype, device=matrix.low.device)
    _decode_rows(module, matrix, rows, 0, first_row)
    return rows


def _decode_rows(
    module: Any, matrix: DeviceMatrix, out: torch.Tensor, row_ids: int, first_row: int
) -> None:
    """Fills `out` [n, num_cols] with rows from first_row on, or with those of ids at an address."""
    words = np.array(_words(matrix, None), np.int64)
    module.dequantize(
        words.ctypes.data,
        row_ids,
        first_row,
        out.data_ptr(),
        _TYPES[out.dtype],
        *out.shape,
        stream_of(out),
    )


def _input_order(matrix: DeviceMatrix, values: torch.Tensor) -> torch.Tensor:
    if matrix.column_order is None:
        return values
    return torch.empty_like(values).index_copy_(1, matrix.column_order, values)


def _words(matrix: DeviceMatrix, bias: torch.Tensor | None) -> list[int]:
    """A matrix as the compiled kernels read it: LinearPart of linear.h."""
    planes = (matrix.low, matrix.high, matrix.scales, matrix.super_scales)
    return [
        matrix.format,
        *(0 if plane is None else plane.data_ptr() for plane in planes),
        matrix.scales_per_chunk,
        matrix.num_rows,
        0 if bias is None else bias.data_ptr(),
    ]


def _join(parts: list[_Part]) -> list[_Part]:
    """Parts of one float type as one matrix."""
    first = parts[0][0]
    if first.is_quantized or len(parts) == 1 or any(m.format != first.format for m, _ in parts):
        return parts
    values = torch.cat([matrix.low for matrix, _ in parts])
    bias = None
    if any(part_bias is not None for _, part_bias in parts):
        bias = torch.cat(
            [
                torch.zeros(matrix.num_rows, device=values.device) if own is None else own
                for matrix, own in parts
            ]
        )
    return [(DeviceMatrix(first.format, len(values), first.num_cols, values), bias)]


def _runs(parts: Sequence[_Part]) -> list[_Run]:
    runs: list[_Run] = []
    begin = first_row = 0
    for end in range(1, len(parts) + 1):
        if end < len(parts) and _have_same_order(parts[begin][0], parts[end][0]):
            continue
        runs.append(_Run(parts[begin:end], first_row))
        first_row += runs[-1].num_rows
        begin = end
    return runs


def _have_same_order(a: DeviceMatrix, b: DeviceMatrix) -> bool:
    if a.column_order is None or b.column_order is None:
        return a.column_order is b.column_order
    return torch.equal(a.column_order, b.column_order)
