"""Matrices rearranged for the compiled kernels, in memory of their own.

A packed matrix has 16 rows side by side, so that a vector has a lane per row as it is read
(ext/include/llmserve/packed_tiles.h, float_formats.h): no kernel has to transpose, and a step reads
one stream. Values stay the same, bit for bit, and so do products.
"""

from __future__ import annotations

import torch

from llmserve.kernels.checks import check
from llmserve.kernels.cpu_functions import HAS_EXT
from llmserve.kernels.huge_pages import HugePages
from llmserve.kernels.weight import GGMLType, Weight

if HAS_EXT:
    from llmserve import _cpu_kernels


def kept_bytes(type: GGMLType, num_rows: int, num_cols: int) -> int:
    """Bytes that `keep` takes for a matrix."""
    if HAS_EXT:
        return _cpu_kernels.packed_bytes(int(type), num_rows, num_cols)
    return num_rows * type.row_bytes(num_cols)


def keep(weight: Weight, memory: HugePages) -> Weight:
    """A copy of a matrix that is not packed: packed if kernels are compiled.

    Raises MemoryError if the reserve has not enough left, ValueError for a packed matrix.
    """
    if weight.is_packed:
        raise ValueError("the matrix is packed already")
    space = memory.take(kept_bytes(weight.type, weight.num_rows, weight.num_cols))
    if HAS_EXT:
        return _pack(weight, space)
    data = space.view(weight.data.shape).copy_(weight.data)
    return Weight(data, weight.type, weight.num_rows, weight.num_cols)


def _pack(weight: Weight, out: torch.Tensor) -> Weight:
    check("weight.data", weight.data, torch.uint8, tuple(weight.data.shape))
    _cpu_kernels.pack(
        weight.data.data_ptr(), int(weight.type), out.data_ptr(), weight.num_rows, weight.num_cols
    )
    return Weight(out, weight.type, weight.num_rows, weight.num_cols, is_packed=True)
