"""Checks of the tensors that a kernel gets by address: one sentence instead of a wild read."""

from __future__ import annotations

import torch


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


def check(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless x is contiguous in CPU memory, of the given type and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {shape} in CPU memory, not {describe(x)}"
        )


def output(out: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """`out` if given, checked, else a new float32 tensor of the shape."""
    if out is None:
        return torch.empty(shape)
    check("out", out, torch.float32, shape)
    return out
