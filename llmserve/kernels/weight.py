"""Weight matrices as kernels see them: bytes of a GGML type, row after row, or packed.

A matrix stays in the form in which its file stores it, and `data` may be a read-only file mapping;
or its bits are rearranged for the compiled kernels (`kernels.keep`), their values unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmserve.core.ggml import GGMLType as GGMLType
from llmserve.kernels.checks import describe

_TORCH_TYPES = {
    torch.float32: GGMLType.F32,
    torch.float16: GGMLType.F16,
    torch.bfloat16: GGMLType.BF16,
}
# As kPacked and kByteActivations in ext/include/llmserve/linear.h.
_PACKED = 0x100
_BYTE_ACTIVATIONS = 0x200


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of `num_rows` x `num_cols`; row r is what output feature r is multiplied with."""

    data: torch.Tensor  # uint8 [num_rows, row_bytes], rows contiguous; packed: [num_bytes]
    type: GGMLType
    num_rows: int
    num_cols: int
    is_packed: bool = False

    def __post_init__(self) -> None:
        if self.is_packed:
            return
        expected = (self.num_rows, self.type.row_bytes(self.num_cols))
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != expected:
            raise ValueError(
                f"{self.type.name} weight of {self.num_rows} x {self.num_cols} needs uint8 data "
                f"of shape {expected}, not {self.data.dtype} {tuple(self.data.shape)}"
            )

    @staticmethod
    def type_of(dtype: torch.dtype) -> GGMLType:
        """Of matrices of floats."""
        return _TORCH_TYPES[dtype]

    @property
    def layout(self) -> int:
        """The type as the compiled kernels take it: its number, and whether it is packed."""
        return int(self.type) | (_PACKED if self.is_packed else 0)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Weight:
        """Wraps a float matrix [num_rows, num_cols] without copying it."""
        num_rows, num_cols = tensor.shape
        raw = tensor.contiguous().view(torch.uint8).reshape(num_rows, -1)
        return cls(raw, _TORCH_TYPES[tensor.dtype], num_rows, num_cols)


class StackedWeights:
    """Matrices one below the other, with the same columns, and a bias for each or None.

    biases: float32 [num_rows] of the matrix. activation_bits: 8 or 16, to which the CPU's kernels
    round activations before they meet quantised weights. Raises ValueError for what does not fit
    together.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        biases: Sequence[torch.Tensor | None],
        activation_bits: int = 16,
    ) -> None:
        self.parts = tuple(zip(weights, biases, strict=True))
        self.num_cols = weights[0].num_cols
        self.num_rows = sum(weight.num_rows for weight in weights)
        self.device = weights[0].data.device
        for weight, bias in self.parts:
            _check("weight.data", weight.data, torch.uint8, tuple(weight.data.shape), self.device)
            if weight.num_cols != self.num_cols:
                raise ValueError(f"{weight.num_cols} columns do not stack on {self.num_cols}")
            if bias is not None:
                _check("bias", bias, torch.float32, (weight.num_rows,), self.device)
        # As the compiled kernels read it: int64 [num_parts, 5].
        self.table = torch.tensor(
            [
                [
                    weight.data.data_ptr(),
                    weight.layout | (_BYTE_ACTIVATIONS if activation_bits == 8 else 0),
                    weight.num_rows,
                    weight.num_cols,
                    0 if bias is None else bias.data_ptr(),
                ]
                for weight, bias in self.parts
            ]
        )


def _check(
    name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device != device:
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {shape} on {device}, not {describe(x)}"
        )
