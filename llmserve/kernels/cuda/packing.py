"""The layout of quantised matrices on the device, as llmserve/cuda/linear_formats.h reads it.

A matrix is repacked once, when it is uploaded: in blocks of 18, 34 or 210 bytes most of a warp's
loads would miss their 16-byte boundaries. Codes lie in planes of their own, in the order in which
lanes read them; scales keep their stored form and size. All of it is torch and runs where the
bytes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from llmserve.core.ggml import GGMLType
from llmserve.kernels.packed_weight import (
    AWQWeight,
    FP8Weight,
    GPTQWeight,
    Int8Weight,
    PackedWeight,
)
from llmserve.kernels.weight import Weight

# Formats beyond the GGML types, as linear.h numbers them.
INT4_ROW = 100
INT4_32 = 101
INT8_ROW = 102
FP8_ROW = 103

_GROUP = 32
_PADDING = 128  # columns come in multiples of it
_SLICE = 1 << 24  # elements that are repacked at a time
_FLOATS = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A matrix in the device's memory. Planes that the format does not have are None."""

    format: int
    num_rows: int
    num_cols: int
    low: torch.Tensor  # floats [num_rows, num_cols], or a plane, uint8 [num_rows, bytes]
    high: torch.Tensor | None = None  # planes likewise
    scales: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    scales_per_chunk: int = 0  # of the ROW formats: 1, or 0 if a scale is a whole row's
    column_order: torch.Tensor | None = None  # int64: the input feature of each column

    @property
    def is_quantized(self) -> bool:
        return not self.low.is_floating_point()

    @property
    def num_bytes(self) -> int:
        planes = (self.low, self.high, self.scales, self.super_scales)
        return sum(plane.nbytes for plane in planes if plane is not None)


def pack_weight(weight: Weight) -> DeviceMatrix:
    """The matrix in the device's layout, where its bytes are; floats are not copied."""
    num_rows, num_cols = weight.num_rows, weight.num_cols
    if not weight.type.is_quantized:
        values = weight.data.view(_FLOATS[weight.type]).view(num_rows, num_cols)
        return DeviceMatrix(int(weight.type), num_rows, num_cols, values)
    step = max(1, _SLICE // num_cols)
    slices = [
        _pack_blocks(weight.type, weight.data[begin : begin + step])
        for begin in range(0, num_rows, step)
    ]
    return DeviceMatrix(
        int(weight.type),
        num_rows,
        num_cols,
        torch.cat([planes.low for planes in slices]),
        _join([planes.high for planes in slices]),
        torch.cat([planes.scales for planes in slices]),
        _join([planes.super_scales for planes in slices]),
    )


def pack_checkpoint_weight(weight: PackedWeight) -> DeviceMatrix:
    """As `pack_weight`, for the storages of other quantisation methods.

    Raises ValueError for groups or tiles that no format holds.
    """
    if isinstance(weight, AWQWeight | GPTQWeight):
        return _pack_int4(weight)
    return _pack_int8(weight) if isinstance(weight, Int8Weight) else _pack_fp8(weight)


class _Planes(NamedTuple):
    """Of some rows, uint8 [num_rows, bytes] each."""

    low: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    super_scales: torch.Tensor | None


class _Blocks(NamedTuple):
    """Codes of some rows, one a byte, and their scales as stored."""

    codes: torch.Tensor  # uint8 [num_rows, num_blocks, columns of a block]
    scales: torch.Tensor  # uint8 [num_rows, num_blocks, bytes]
    super_scales: torch.Tensor | None = None  # likewise


class _Type(NamedTuple):
    unpack: Callable[[torch.Tensor], _Blocks]
    low_bits: int
    high_bits: int
    has_halves: bool  # the halves of a group have scales of their own


def _join(planes: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [plane for plane in planes if plane is not None]
    return torch.cat(present) if present else None


def _pack_blocks(kind: GGMLType, data: torch.Tensor) -> _Planes:
    stored = _TYPES[kind]
    blocks = stored.unpack(data.reshape(len(data), -1, kind.block_bytes))
    low, high = _pack_codes(blocks.codes.flatten(1), stored)
    scales = blocks.scales
    if kind.block_len == _GROUP:
        num_groups = -(-scales.shape[1] * _GROUP // _PADDING) * (_PADDING // _GROUP)
        scales = pad(scales, (0, 0, 0, num_groups - scales.shape[1]))
    extra = blocks.super_scales
    return _Planes(low, high, scales.flatten(1), None if extra is None else extra.flatten(1))


def _pack_codes(codes: torch.Tensor, stored: _Type) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The low and the high plane of codes, uint8 [num_rows, num_cols]."""
    num_rows, num_cols = codes.shape
    codes = pad(codes, (0, -num_cols % _PADDING))
    if stored.low_bits == 8:
        # Four bytes make two pairs of columns; the columns of a pair lie 16 bits apart.
        lanes = codes.view(num_rows, -1, 2, 4, 2, 2, 2).permute(0, 1, 3, 2, 4, 6, 5)
        return lanes.flatten(1).contiguous(), None
    if stored.has_halves:
        lanes = codes.view(num_rows, -1, 4, 2, 4, 4).permute(0, 1, 4, 2, 3, 5)
    else:
        lanes = codes.view(num_rows, -1, 4, 4, 8).permute(0, 1, 3, 2, 4)
    # For each lane and group four pairs of columns.
    pairs = lanes.reshape(num_rows, -1, 4, 4, 4, 2)
    low = _PACK_BITS[stored.low_bits](pairs & ((1 << stored.low_bits) - 1))
    if not stored.high_bits:
        return low, None
    return low, _PACK_BITS[stored.high_bits](pairs >> stored.low_bits)


# pairs: uint8 [num_rows, num_chunks, 4 lanes, 4 groups, 4 pairs, 2 columns]. The first columns of
# pairs go to the low halves of 32-bit words, the second ones to the same places of the high halves.


def _pack_bits_4(pairs: torch.Tensor) -> torch.Tensor:
    """A word a group."""
    bytes_ = pairs[..., 0::2, :] | pairs[..., 1::2, :] << 4
    return bytes_.transpose(-1, -2).flatten(1)


def _pack_bits_2(pairs: torch.Tensor) -> torch.Tensor:
    """A word for two groups, one in the low and one in the high byte of each half."""
    p = pairs
    bytes_ = p[..., 0, :] | p[..., 1, :] << 2 | p[..., 2, :] << 4 | p[..., 3, :] << 6
    return bytes_.reshape(*p.shape[:3], 2, 2, 2).transpose(-1, -2).flatten(1)


def _pack_bits_1(pairs: torch.Tensor) -> torch.Tensor:
    """A word for four groups, four bits each in either half."""
    p = pairs
    nibbles = p[..., 0, :] | p[..., 1, :] << 1 | p[..., 2, :] << 2 | p[..., 3, :] << 3
    bytes_ = nibbles[..., 0::2, :] | nibbles[..., 1::2, :] << 4
    return bytes_.transpose(-1, -2).flatten(1)


_PACK_BITS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    1: _pack_bits_1,
    2: _pack_bits_2,
    4: _pack_bits_4,
}


# The blocks of GGML types: b is uint8 [num_rows, num_blocks, block_bytes].


def _shifts(data: torch.Tensor, step: int) -> torch.Tensor:
    return torch.arange(0, 8, step, dtype=torch.uint8, device=data.device)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Of 16 bytes: the low ones, then the high ones."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """The 32 bits of 4 bytes, as 16 or 0."""
    return ((data.unsqueeze(-1) >> _shifts(data, 1) & 1) << 4).flatten(-2)


def _nibble_groups(data: torch.Tensor, width: int) -> torch.Tensor:
    """The low, then the high nibbles of each `width` of 128 bytes."""
    runs = data.reshape(*data.shape[:2], -1, width)
    return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _bit_groups(data: torch.Tensor) -> torch.Tensor:
    """Group g is bit g of 32 bytes."""
    return (data.unsqueeze(-2) >> _shifts(data, 1).view(8, 1) & 1).flatten(-2)


def _two_bit_groups(data: torch.Tensor) -> torch.Tensor:
    """Four groups from each 32 of 64 bytes, two bits each."""
    runs = data.reshape(*data.shape[:2], 2, 1, 32)
    return (runs >> _shifts(data, 2).view(4, 1) & 3).flatten(-3)


def _unpack_q4_0(b: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(b[..., 2:]), b[..., :2])


def _unpack_q4_1(b: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(b[..., 4:]), b[..., :4])


def _unpack_q5_0(b: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6]), b[..., :2])


def _unpack_q5_1(b: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8]), b[..., :4])


def _unpack_q8_0(b: torch.Tensor) -> _Blocks:
    return _Blocks(b[..., 2:] ^ 0x80, b[..., :2])


def _unpack_q4_k(b: torch.Tensor) -> _Blocks:
    return _Blocks(_nibble_groups(b[..., 16:], 32), b[..., :16])


def _unpack_q5_k(b: torch.Tensor) -> _Blocks:
    codes = _nibble_groups(b[..., 48:], 32) | _bit_groups(b[..., 16:48]) << 4
    return _Blocks(codes, b[..., :16])


def _unpack_q6_k(b: torch.Tensor) -> _Blocks:
    codes = _nibble_groups(b[..., :128], 64) | _two_bit_groups(b[..., 128:192]) << 4
    return _Blocks(codes, b[..., 192:208], b[..., 208:])


def _unpack_q3_k(b: torch.Tensor) -> _Blocks:
    codes = _two_bit_groups(b[..., 32:96]) | _bit_groups(b[..., :32]) << 2
    return _Blocks(codes, pad(b[..., 96:], (0, 2)))


def _unpack_q2_k(b: torch.Tensor) -> _Blocks:
    return _Blocks(_two_bit_groups(b[..., 16:80]), b[..., :16], b[..., 80:])


_TYPES: dict[GGMLType, _Type] = {
    GGMLType.Q4_0: _Type(_unpack_q4_0, 4, 0, False),
    GGMLType.Q4_1: _Type(_unpack_q4_1, 4, 0, False),
    GGMLType.Q5_0: _Type(_unpack_q5_0, 4, 1, False),
    GGMLType.Q5_1: _Type(_unpack_q5_1, 4, 1, False),
    GGMLType.Q8_0: _Type(_unpack_q8_0, 8, 0, False),
    GGMLType.Q4_K: _Type(_unpack_q4_k, 4, 0, False),
    GGMLType.Q5_K: _Type(_unpack_q5_k, 4, 1, False),
    GGMLType.Q6_K: _Type(_unpack_q6_k, 4, 2, True),
    GGMLType.Q3_K: _Type(_unpack_q3_k, 2, 1, True),
    GGMLType.Q2_K: _Type(_unpack_q2_k, 2, 0, True),
}


# Checkpoints of other methods.


def _pack_int4(weight: AWQWeight | GPTQWeight) -> DeviceMatrix:
    parts = weight.int4_codes()
    num_rows, num_cols = parts.codes.shape
    low, _ = _pack_codes(parts.codes, _TYPES[GGMLType.Q4_0])
    pairs = torch.stack([parts.scales, parts.zeros.float()], dim=-1).to(torch.float16)
    kind = INT4_ROW
    spread = _spread(pairs, parts.group_size, num_cols, _PADDING)
    if spread is None:
        kind = INT4_32
        spread = _spread(pairs, parts.group_size, num_cols, _GROUP)
    if spread is None:
        raise ValueError(f"groups of {parts.group_size} columns are not a multiple of {_GROUP}")
    return DeviceMatrix(
        kind,
        num_rows,
        num_cols,
        low,
        scales=_bytes(spread),
        scales_per_chunk=int(pairs.shape[1] > 1),
        column_order=parts.column_order,
    )


def _pack_int8(weight: Int8Weight) -> DeviceMatrix:
    num_rows, num_cols = weight.num_rows, weight.num_cols
    low, _ = _pack_codes(weight.data.view(torch.uint8) ^ 0x80, _TYPES[GGMLType.Q8_0])
    group_size = num_cols // weight.scales.shape[1]
    scales = weight.scales.unsqueeze(-1)
    kind = INT8_ROW
    spread = _spread(scales, group_size, num_cols, _PADDING)
    if spread is None:
        # Small groups become those of Q8_0, whose scales are float16.
        kind = int(GGMLType.Q8_0)
        spread = _spread(scales.to(torch.float16), group_size, num_cols, _GROUP)
    if spread is None:
        raise ValueError(f"groups of {group_size} columns are not a multiple of {_GROUP}")
    return DeviceMatrix(
        kind,
        num_rows,
        num_cols,
        low,
        scales=_bytes(spread),
        scales_per_chunk=int(scales.shape[1] > 1),
    )


def _pack_fp8(weight: FP8Weight) -> DeviceMatrix:
    low, _ = _pack_codes(weight.data.view(torch.uint8), _TYPES[GGMLType.Q8_0])
    has_tiles = weight.block is not None
    return DeviceMatrix(
        FP8_ROW,
        weight.num_rows,
        weight.num_cols,
        low,
        scales=_bytes(weight.row_scales(_PADDING)),
        scales_per_chunk=int(has_tiles),
    )


def _spread(
    scales: torch.Tensor, group_size: int, num_cols: int, width: int
) -> torch.Tensor | None:
    """Scales [num_rows, num_groups, n] repeated for each `width` columns, zero beyond the last.

    A row's only scale stays alone. None where groups are not a multiple of the width.
    """
    if scales.shape[1] == 1 and width == _PADDING:
        return scales
    if group_size % width:
        return None
    spread = scales.repeat_interleave(group_size // width, dim=1)
    num_needed = -(-num_cols // _PADDING) * (_PADDING // width)
    return pad(spread, (0, 0, 0, num_needed - spread.shape[1]))


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.contiguous().view(torch.uint8).flatten(1)
