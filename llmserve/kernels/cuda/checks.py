"""Checks of the tensors that a CUDA kernel gets by address, and the stream that it runs in."""

from __future__ import annotations

from collections.abc import Collection

import torch

from llmserve.kernels.checks import describe
from llmserve.kernels.layer_parameters import NormParameters

# Numbered as DType in ext/include/llmserve/cuda/types.h.
ACT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_TYPES = ACT_TYPES | {torch.float8_e4m3fn: 3}


def stream_of(x: torch.Tensor) -> int:
    """Address of torch's current stream on the tensor's device; 0 in CPU memory."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def check(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> int:
    """The tensor's address. Raises ValueError unless it is contiguous, of this type and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device != device:
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {shape} on {device}, not {describe(x)}"
        )
    return x.data_ptr()


def check_optional(
    name: str,
    x: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> int:
    """The same, and 0 for None."""
    return 0 if x is None else check(name, x, dtype, shape, device)


def row_strides(
    name: str, x: torch.Tensor, dtypes: Collection[torch.dtype], device: torch.device
) -> tuple[int, int]:
    """Distances between tokens and between heads of [num_tokens, (num_heads,) size].

    Raises ValueError for another dtype or device and for rows whose elements are not adjacent.
    """
    strides = x.stride()
    if (
        x.dtype not in dtypes
        or x.device != device
        or not 1 <= x.dim() <= 3
        or (strides[-1] != 1 and x.shape[-1] > 1)
    ):
        types = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} must be {types} of 1 to 3 dimensions on {device} with adjacent elements, "
            f"not {describe(x)}"
        )
    if x.dim() == 3:
        return strides[0], strides[1]
    return (strides[0], 0) if x.dim() == 2 else (0, 0)


def norm_arguments(
    name: str, norm: NormParameters | None, size: int, device: torch.device
) -> tuple[int, float, float]:
    """Address, eps and weight offset of a norm; zeros for None."""
    if norm is None:
        return 0, 0.0, 0.0
    weight = check(f"{name}.weight", norm.weight, torch.float32, (size,), device)
    return weight, norm.eps, norm.weight_offset
