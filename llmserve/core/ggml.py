"""The storage types of GGML: names, numbers and block layouts, after the GGUF specification.

A row of a matrix is a run of blocks; a block holds `block_len` elements in `block_bytes` bytes.
"""

from __future__ import annotations

import enum


class GGMLType(enum.IntEnum):
    """Storage types that the server computes with, by their number in GGUF files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_len(self) -> int:
        """Elements per block; a row's length must be a multiple of it."""
        return _LAYOUT[self][0]

    @property
    def block_bytes(self) -> int:
        return _LAYOUT[self][1]

    @property
    def is_quantized(self) -> bool:
        return self.block_len > 1

    def row_bytes(self, num_cols: int) -> int:
        """Bytes of a row. Raises ValueError if the row does not consist of whole blocks."""
        if num_cols % self.block_len:
            raise ValueError(
                f"rows of {num_cols} elements do not divide into {self.name} blocks "
                f"of {self.block_len}"
            )
        return num_cols // self.block_len * self.block_bytes


_LAYOUT: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
}
