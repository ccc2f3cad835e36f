"""Random matrices in the storages of quantised checkpoints, packed as their files pack them."""

from __future__ import annotations

import numpy as np
import torch

from llmserve.kernels.packed_weight import AWQWeight, FP8Weight, GPTQWeight, Int8Weight


def random_awq(num_rows: int, num_cols: int, group_size: int, seed: int = 0) -> AWQWeight:
    rng = np.random.default_rng(seed)
    num_groups = num_cols // group_size
    return AWQWeight(
        pack_awq(rng.integers(0, 16, (num_cols, num_rows))),
        pack_awq(rng.integers(0, 16, (num_groups, num_rows))),
        _scales(rng, num_groups, num_rows),
    )


def random_gptq(
    num_rows: int, num_cols: int, group_size: int, *, has_act_order: bool = False, seed: int = 0
) -> GPTQWeight:
    rng = np.random.default_rng(seed)
    num_groups = num_cols // group_size
    groups = np.repeat(np.arange(num_groups, dtype=np.int32), group_size)
    if has_act_order:
        rng.shuffle(groups)
    return GPTQWeight(
        pack_nibbles(rng.integers(0, 16, (num_cols, num_rows)), axis=0),
        pack_nibbles(rng.integers(0, 16, (num_groups, num_rows)), axis=1),
        _scales(rng, num_groups, num_rows),
        torch.from_numpy(groups),
    )


def random_int8(num_rows: int, num_cols: int, group_size: int, seed: int = 0) -> Int8Weight:
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (num_rows, num_cols)).astype(np.int8)
    scales = _scales(rng, num_rows, num_cols // group_size).float()
    return Int8Weight(torch.from_numpy(codes), scales)


def random_fp8(
    num_rows: int,
    num_cols: int,
    *,
    has_row_scales: bool = False,
    block: tuple[int, int] | None = None,
    seed: int = 0,
) -> FP8Weight:
    """All finite floats of 8 bits, subnormal ones too."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (num_rows, num_cols)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E  # NaN
    shape = (num_rows if has_row_scales else 1, 1)
    if block is not None:
        shape = (-(-num_rows // block[0]), -(-num_cols // block[1]))
    scales = torch.from_numpy(rng.normal(scale=0.02, size=shape).astype(np.float32))
    return FP8Weight(torch.from_numpy(codes).view(torch.float8_e4m3fn), scales, block)


def pack_nibbles(codes: np.ndarray, axis: int) -> torch.Tensor:
    """int32 words of eight neighbours along an axis, the first in the lowest nibble."""
    eights = np.moveaxis(codes, axis, -1).reshape(*np.moveaxis(codes, axis, -1).shape[:-1], -1, 8)
    words = sum(eights[..., i].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    return torch.from_numpy(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32).copy())


def pack_awq(codes: np.ndarray) -> torch.Tensor:
    """int32 words of eight rows, in the order that AWQ gives them."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    eights = codes.reshape(len(codes), -1, 8)[:, :, order]
    return pack_nibbles(eights.reshape(codes.shape), axis=1)


def _scales(rng: np.random.Generator, num_groups: int, num_rows: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(scale=0.02, size=(num_groups, num_rows)).astype(np.float16))
