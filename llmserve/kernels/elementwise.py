"""Operations on single rows or elements: norm, rotary embedding, gated activation, soft-cap.

This module checks; the compiled extension computes. A row is reduced in an order that depends on
its length alone, so it has the same bits alone or among any others, on any number of threads.
"""

from __future__ import annotations

import torch

from llmserve import _cpu_kernels
from llmserve.kernels.checks import check, describe, output

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def _row_strides(name: str, x: torch.Tensor) -> tuple[int, int]:
    """Distances between tokens and between heads of [num_tokens, (num_heads,) size]."""
    strides = x.stride()
    ndim = len(strides)
    if (
        x.dtype != torch.float32
        or not 1 <= ndim <= 3
        or (strides[-1] != 1 and x.shape[-1] > 1)
        or not x.is_cpu
    ):
        raise ValueError(
            f"{name} must be float32 of 1 to 3 dimensions in CPU memory with adjacent elements, "
            f"not {describe(x)}"
        )
    if ndim == 3:
        return strides[0], strides[1]
    return (strides[0], 0) if ndim == 2 else (0, 0)


def _rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    x_strides = _row_strides("x", x)
    shape = x.shape
    size = shape[-1]
    check("weight", weight, torch.float32, (size,))
    if out is None:
        out = torch.empty(shape)
    elif out.shape != shape:
        raise ValueError(f"out must have the shape {tuple(shape)} of x, not {tuple(out.shape)}")
    out_strides = _row_strides("out", out)
    residual_ptr = 0
    residual_strides = (0, 0)
    if residual is not None:
        residual_strides = _row_strides("residual", residual)
        residual_ptr = residual.data_ptr()
        if residual.shape != shape:
            raise ValueError(f"residual must have the shape {tuple(shape)} of x")
    _cpu_kernels.rms_norm(
        x.data_ptr(),
        *x_strides,
        residual_ptr,
        *residual_strides,
        out.data_ptr(),
        *out_strides,
        weight.data_ptr(),
        shape[0] if len(shape) > 1 else 1,
        shape[1] if len(shape) > 2 else 1,
        size,
        eps,
        weight_offset,
    )
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight_offset + weight) over the last dimension.

    x: float32 [size], [num_tokens, size] or [num_tokens, num_heads, size]; all dimensions but the
    last may be strided. weight: float32 [size], contiguous. Returns `out` (same shape as x, may be
    x itself) or a new tensor. Raises ValueError for a wrong dtype, shape, layout or device.
    """
    return _rms_norm(x, None, weight, eps, weight_offset, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x in place; returns rms_norm(residual). `out` may be x itself.

    residual: float32, same shape as x; the rest as in rms_norm.
    """
    return _rms_norm(x, residual, weight, eps, weight_offset, out)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool = False,
) -> None:
    """Rotates the first rotary_dim values of each head of q and k in place.

    q, k: float32 [num_tokens, num_heads, head_dim], each with its own num_heads; tokens and heads
    may be strided. positions: int32 or int64 [num_tokens], contiguous.
    cos, sin: float32 [max_positions, rotary_dim / 2], contiguous, rotary_dim <= head_dim.
    Value i pairs with i + rotary_dim / 2; with is_interleaved, 2i pairs with 2i + 1.

    Raises ValueError for a wrong dtype, shape, layout or device and IndexError for a position
    outside the tables.
    """
    q_strides = _row_strides("q", q)
    k_strides = _row_strides("k", k)
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0]:
        raise ValueError(
            "q and k must have the shape [num_tokens, num_heads, head_dim], "
            f"not {tuple(q.shape)} and {tuple(k.shape)}"
        )
    num_tokens = q.shape[0]
    if (
        positions.dtype not in (torch.int32, torch.int64)
        or positions.shape != (num_tokens,)
        or not positions.is_contiguous()
        or not positions.is_cpu
    ):
        raise ValueError(
            f"positions must be contiguous int32 or int64 of shape {(num_tokens,)}, "
            f"not {describe(positions)}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            table.dtype != torch.float32
            or table.dim() != 2
            or not table.is_contiguous()
            or not table.is_cpu
        ):
            raise ValueError(
                f"{name} must be contiguous float32 [max_positions, rotary_dim / 2], "
                f"not {describe(table)}"
            )
    max_positions, half_dim = cos.shape
    if sin.shape != cos.shape or 2 * half_dim > min(q.shape[2], k.shape[2]):
        raise ValueError(
            f"cos and sin of shapes {tuple(cos.shape)} and {tuple(sin.shape)} do not fit heads of "
            f"{q.shape[2]} and {k.shape[2]} values"
        )
    _cpu_kernels.rotary(
        q.data_ptr(),
        *q_strides,
        q.shape[1],
        k.data_ptr(),
        *k_strides,
        k.shape[1],
        positions.data_ptr(),
        positions.dtype == torch.int64,
        cos.data_ptr(),
        sin.data_ptr(),
        max_positions,
        half_dim,
        num_tokens,
        is_interleaved,
    )


def act_mul(
    gate_up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """activation(gate) * up.

    gate_up: float32 [num_tokens, 2 * size], gate first; tokens may be strided. activation: "silu",
    "gelu" (exact) or "gelu_tanh". Returns float32 [num_tokens, size]: `out` if given (contiguous),
    else a new tensor. Raises ValueError for another activation or a wrong dtype, shape, layout or
    device.
    """
    token_stride, _ = _row_strides("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up must have the shape [num_tokens, 2 * size], not {tuple(gate_up.shape)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; known are {', '.join(ACTIVATIONS)}")
    num_tokens, width = gate_up.shape
    out = output(out, (num_tokens, width // 2))
    _cpu_kernels.act_mul(
        gate_up.data_ptr(),
        token_stride,
        ACTIVATIONS[activation],
        out.data_ptr(),
        num_tokens,
        width // 2,
    )
    return out


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cap * tanh(x / cap) in place; returns x.

    x: float32 of any shape, contiguous. Raises ValueError for a wrong dtype, layout or device, or
    a cap that is not positive.
    """
    if x.dtype != torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"x must be contiguous float32 in CPU memory, not {describe(x)}")
    if not cap > 0.0:
        raise ValueError(f"cap is {cap}; it must be above 0")
    _cpu_kernels.softcap(x.data_ptr(), x.numel(), cap)
    return x
