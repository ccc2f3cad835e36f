"""Weights of every storage type: random, extreme, and what they mean in float64."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from llmserve.kernels import GGMLType, Weight

Doubles = npt.NDArray[np.float64]

_TORCH_TYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}
# Where a block keeps its float16 scales; any other byte may have any value.
_SCALES = {
    GGMLType.Q8_0: [0],
    GGMLType.Q4_0: [0],
    GGMLType.Q4_1: [0, 2],
    GGMLType.Q5_0: [0],
    GGMLType.Q5_1: [0, 2],
    GGMLType.Q2_K: [80, 82],
    GGMLType.Q3_K: [108],
    GGMLType.Q4_K: [0, 2],
    GGMLType.Q5_K: [0, 2],
    GGMLType.Q6_K: [208],
}


def random_weight(type: GGMLType, num_rows: int, num_cols: int, seed: int = 0) -> Weight:
    """Blocks of random bits with random scales of both signs, some of them subnormal."""
    rng = np.random.default_rng(seed)
    if not type.is_quantized:
        values = torch.from_numpy(rng.normal(size=(num_rows, num_cols)).astype(np.float32))
        return Weight.from_tensor(values.to(_TORCH_TYPES[type]))
    blocks = _blocks(type, num_rows, num_cols)
    blocks[:] = rng.integers(0, 256, blocks.shape)
    for offset in _SCALES[type]:
        scales = rng.normal(scale=0.02, size=blocks.shape[:2]).astype(np.float16)
        scales[rng.random(scales.shape) < 0.05] = np.float16(3e-6)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return _weight(blocks, type, num_cols)


def constant_weight(type: GGMLType, byte: int, num_rows: int, num_cols: int) -> Weight:
    """Blocks in which each byte is `byte`, but for the scales, which are 1."""
    blocks = _blocks(type, num_rows, num_cols)
    blocks[:] = byte
    for offset in _SCALES[type]:
        blocks[:, :, offset : offset + 2] = np.array([1], np.float16).view(np.uint8)
    return _weight(blocks, type, num_cols)


def values_of(weight: Weight) -> npt.NDArray[np.float32]:
    """The matrix as the gguf package reads it."""
    kind = GGMLQuantizationType(int(weight.type))
    values = gguf.dequantize(np.ascontiguousarray(weight.data.numpy()), kind)
    return np.ascontiguousarray(values, dtype=np.float32)


def quantized_activations(x: torch.Tensor, steps: int = 32767) -> Doubles:
    """x in groups of 32 columns, rounded to so many steps up to the largest, in float32."""
    groups = x.numpy().reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(steps), largest, out=np.zeros_like(largest), where=largest > 0)
    quants = np.rint(groups * inverse).astype(np.float64)
    return (quants * (largest / np.float32(steps))).reshape(x.shape)


def _blocks(type: GGMLType, num_rows: int, num_cols: int) -> npt.NDArray[np.uint8]:
    return np.empty((num_rows, num_cols // type.block_len, type.block_bytes), np.uint8)


def _weight(blocks: npt.NDArray[np.uint8], type: GGMLType, num_cols: int) -> Weight:
    return Weight(torch.from_numpy(blocks.reshape(len(blocks), -1)), type, len(blocks), num_cols)
