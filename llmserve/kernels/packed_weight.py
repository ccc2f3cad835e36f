"""Weight matrices of quantised Hugging Face checkpoints, as their files store them.

One class for each storage; `dequantize` says what the numbers mean. Tensors may lie on any device.
Columns are input features and rows are output features, as in `Weight`; the files of AWQ and GPTQ
keep the transpose, eight codes of 4 bits to an int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

# Which of 8 neighbouring rows a nibble of AWQ's words belongs to, from the lowest nibble on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Int4Codes:
    """value[r, c] = scales[r, g] * (codes[r, c] - zeros[r, g]), g being c // group_size.

    `column_order` is None, or says which input feature a column is multiplied with.
    """

    codes: torch.Tensor  # uint8 [num_rows, num_cols], each below 16
    scales: torch.Tensor  # float32 [num_rows, num_groups]
    zeros: torch.Tensor  # uint8 [num_rows, num_groups], each below 16
    group_size: int
    column_order: torch.Tensor | None = None  # int64 [num_cols]

    def dequantize(self) -> torch.Tensor:
        """float32 [num_rows, num_cols], in the order of the input features."""
        scales = self.scales.repeat_interleave(self.group_size, dim=1)
        zeros = self.zeros.repeat_interleave(self.group_size, dim=1)
        values = scales * (self.codes.float() - zeros.float())
        if self.column_order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.column_order, values)


@dataclass(frozen=True, slots=True)
class AWQWeight:
    """The GEMM layout of AutoAWQ."""

    qweight: torch.Tensor  # int32 [num_cols, num_rows / 8]
    qzeros: torch.Tensor  # int32 [num_groups, num_rows / 8]
    scales: torch.Tensor  # float16 [num_groups, num_rows]

    @property
    def num_rows(self) -> int:
        return self.scales.shape[1]

    @property
    def num_cols(self) -> int:
        return self.qweight.shape[0]

    def to(self, device: torch.device) -> AWQWeight:
        return AWQWeight(self.qweight.to(device), self.qzeros.to(device), self.scales.to(device))

    def int4_codes(self) -> Int4Codes:
        return Int4Codes(
            _awq_nibbles(self.qweight).T.contiguous(),
            self.scales.T.float().contiguous(),
            _awq_nibbles(self.qzeros).T.contiguous(),
            self.num_cols // len(self.scales),
        )

    def dequantize(self) -> torch.Tensor:
        """float32 [num_rows, num_cols]."""
        return self.int4_codes().dequantize()


@dataclass(frozen=True, slots=True)
class GPTQWeight:
    """GPTQ with 4 bits. g_idx: the group of each column, None if they follow each other."""

    qweight: torch.Tensor  # int32 [num_cols / 8, num_rows]
    qzeros: torch.Tensor  # int32 [num_groups, num_rows / 8]
    scales: torch.Tensor  # float16 [num_groups, num_rows]
    g_idx: torch.Tensor | None = None  # int32 [num_cols]
    # Added to stored zero points, of which 15 then stands for 0. None is in the second version.
    zero_offset: int = 1

    @property
    def num_rows(self) -> int:
        return self.scales.shape[1]

    @property
    def num_cols(self) -> int:
        return self.qweight.shape[0] * 8

    def to(self, device: torch.device) -> GPTQWeight:
        g_idx = None if self.g_idx is None else self.g_idx.to(device)
        return GPTQWeight(
            self.qweight.to(device),
            self.qzeros.to(device),
            self.scales.to(device),
            g_idx,
            self.zero_offset,
        )

    def int4_codes(self) -> Int4Codes:
        """Columns sorted by their groups. Raises ValueError if the groups have unequal sizes."""
        num_groups = len(self.scales)
        group_size = self.num_cols // num_groups
        codes = _nibbles(self.qweight, dim=0).T.contiguous()
        order = None
        if self.g_idx is not None:
            groups, order = torch.sort(self.g_idx.long(), stable=True)
            columns = torch.arange(self.num_cols, device=order.device)
            if not torch.equal(groups, columns // group_size):
                raise ValueError(f"g_idx does not divide the columns into groups of {group_size}")
            order = None if torch.equal(order, columns) else order
        return Int4Codes(
            codes if order is None else codes[:, order],
            self.scales.T.float().contiguous(),
            (_nibbles(self.qzeros, dim=1) + self.zero_offset & 15).T.contiguous(),
            group_size,
            order,
        )

    def dequantize(self) -> torch.Tensor:
        """float32 [num_rows, num_cols]."""
        return self.int4_codes().dequantize()


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """value = scale * code, with a scale for each group of a row's columns."""

    data: torch.Tensor  # int8 [num_rows, num_cols]
    scales: torch.Tensor  # float32 [num_rows, num_groups]

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def num_cols(self) -> int:
        return self.data.shape[1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    def to(self, device: torch.device) -> Int8Weight:
        return Int8Weight(self.data.to(device), self.scales.to(device))

    def dequantize(self) -> torch.Tensor:
        """float32 [num_rows, num_cols]."""
        scales = self.scales.repeat_interleave(self.num_cols // self.num_groups, dim=1)
        return self.data.float() * scales


@dataclass(frozen=True, slots=True)
class FP8Weight:
    """value = scale * float, with a scale for each block of rows and columns: one for the matrix,
    one for each row, or one for each tile of as many rows and columns as divide the matrix."""

    data: torch.Tensor  # float8_e4m3fn [num_rows, num_cols]
    scales: torch.Tensor  # float32 [num_row_blocks, num_col_blocks]
    block: tuple[int, int] | None = None  # rows and columns of a tile; the last may be smaller

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def num_cols(self) -> int:
        return self.data.shape[1]

    def to(self, device: torch.device) -> FP8Weight:
        # As bytes: not every device has copies of this type.
        data = self.data.view(torch.uint8).to(device).view(self.data.dtype)
        return FP8Weight(data, self.scales.to(device), self.block)

    def row_scales(self, columns: int) -> torch.Tensor:
        """float32 [num_rows, n]: n is 1, or one for each `columns` columns of tiles.

        Raises ValueError if a tile's columns are not a multiple of `columns`.
        """
        if self.block is None:
            return self.scales.expand(self.num_rows, 1).contiguous()
        rows, width = self.block
        if width % columns:
            raise ValueError(f"tiles of {width} columns are not a multiple of {columns}")
        spread = self.scales.repeat_interleave(rows, dim=0)[: self.num_rows]
        spread = spread.repeat_interleave(width // columns, dim=1)
        return spread[:, : -(-self.num_cols // columns)].contiguous()

    def dequantize(self) -> torch.Tensor:
        """float32 [num_rows, num_cols]."""
        if self.block is None:
            return self.data.float() * self.row_scales(1)
        return self.data.float() * self.row_scales(1)[:, : self.num_cols]


PackedWeight: TypeAlias = AWQWeight | GPTQWeight | Int8Weight | FP8Weight


def _nibbles(words: torch.Tensor, dim: int) -> torch.Tensor:
    """int32 words as uint8 codes, eight from the lowest nibble on for each along `dim`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(dim + 1) >> shifts.view(-1, *([1] * (1 - dim)))) & 15
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(words, dim=1).view(len(words), -1, 8)
    order = torch.tensor(_AWQ_ORDER, device=words.device)
    return torch.empty_like(codes).index_copy_(2, order, codes).flatten(1)
