"""Matrices of quantised Hugging Face checkpoints as GGML types, which all kernels of the CPU know.

Codes stay as they are. Scales and minima become float16, which those of AWQ and GPTQ are; what no
type of blocks can hold becomes floats of 16 bits.
"""

from __future__ import annotations

import torch

from llmserve.kernels.packed_weight import (
    AWQWeight,
    FP8Weight,
    GPTQWeight,
    Int4Codes,
    Int8Weight,
    PackedWeight,
)
from llmserve.kernels.weight import GGMLType, Weight

_BLOCK = 32
_SYMMETRIC_ZERO = 8  # the zero point of Q4_0


def as_ggml(weight: PackedWeight) -> Weight:
    """Q4_0 or Q4_1 for 4 bits, Q8_0 for int8, BF16 for fp8; F16 where groups do not divide into
    blocks of 32 columns or where their columns are not neighbours."""
    if isinstance(weight, FP8Weight):
        return Weight.from_tensor(weight.dequantize().to(torch.bfloat16))
    if isinstance(weight, AWQWeight | GPTQWeight):
        parts = weight.int4_codes()
        if parts.group_size % _BLOCK == 0 and parts.column_order is None:
            return _as_q4(parts)
    elif isinstance(weight, Int8Weight) and not weight.num_cols // weight.num_groups % _BLOCK:
        return _as_q8_0(weight)
    return Weight.from_tensor(weight.dequantize().to(torch.float16))


def _as_q4(parts: Int4Codes) -> Weight:
    num_rows, num_cols = parts.codes.shape
    halves = parts.codes.view(num_rows, -1, 2, _BLOCK // 2)
    nibbles = halves[:, :, 0] | halves[:, :, 1] << 4
    times = parts.group_size // _BLOCK
    scales = [_half_bytes(parts.scales, times)]
    kind = GGMLType.Q4_0
    if bool((parts.zeros != _SYMMETRIC_ZERO).any()):
        kind = GGMLType.Q4_1
        scales.append(_half_bytes(-parts.scales * parts.zeros, times))
    blocks = torch.cat([*scales, nibbles], dim=-1)
    return Weight(blocks.flatten(1), kind, num_rows, num_cols)


def _as_q8_0(weight: Int8Weight) -> Weight:
    codes = weight.data.view(torch.uint8).view(weight.num_rows, -1, _BLOCK)
    times = weight.num_cols // weight.num_groups // _BLOCK
    blocks = torch.cat([_half_bytes(weight.scales, times), codes], dim=-1)
    return Weight(blocks.flatten(1), GGMLType.Q8_0, weight.num_rows, weight.num_cols)


def _half_bytes(values: torch.Tensor, times: int) -> torch.Tensor:
    """float32 [num_rows, num_groups] as float16, each `times` times: uint8 [num_rows, n, 2]."""
    spread = values.to(torch.float16).repeat_interleave(times, dim=1)
    return spread.unsqueeze(-1).view(torch.uint8)
