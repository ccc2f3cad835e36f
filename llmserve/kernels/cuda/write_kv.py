"""Norm of q and k, rotary embedding and the writing of K and V into their cache, in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from llmserve.kernels.checks import describe
from llmserve.kernels.cuda.checks import (
    ACT_TYPES,
    CACHE_TYPES,
    check,
    check_optional,
    norm_arguments,
    row_strides,
    stream_of,
)
from llmserve.kernels.layer_parameters import NormParameters, RotaryParameters


def rotate_and_write_kv(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    rotary: RotaryParameters | None = None,
    positions: torch.Tensor | None = None,
    q_norm: NormParameters | None = None,
    k_norm: NormParameters | None = None,
    caches: tuple[torch.Tensor, torch.Tensor] | None = None,
    slot_mapping: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    is_k_kept: bool = False,
) -> None:
    """Norm and rotation of each head of q and k, and K and V into their slots, in one launch.

    q, k, v: activations [num_tokens, num_heads or num_kv_heads, head_dim], tokens and heads may be
    strided. q changes in place; k changes in place if `is_k_kept`, else only on its way into the
    cache; v is None where there are no caches.
    rotary: cos, sin float32 [max_positions, rotary_dim / 2]; value i pairs with
    i + rotary_dim / 2, with is_interleaved 2i with 2i + 1; None: nothing is rotated.
    positions: int64 [num_tokens]; one outside the tables is taken for the nearest one inside.
    q_norm, k_norm: over each head, before the rotation, with the same eps and weight_offset.
    caches: K and V, float32, float16, bfloat16 or float8_e4m3fn [num_blocks, block_size,
    num_kv_heads, head_dim], each block contiguous; scales: float32 [num_kv_heads] for each: a value
    is stored as value / scale. Beyond the range of float16 or float8 it becomes the largest.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset; a token whose slot is outside
    the cache, as -1 is, is not stored.

    Raises ValueError for a wrong dtype, shape, layout or device.
    """
    device, dtype = k.device, k.dtype
    num_tokens, num_heads, head_dim = _head_shape("q", q)
    num_kv_heads = _head_shape("k", k)[1]
    for name, x in (("k", k), ("v", v)):
        if x is not None and x.shape != (num_tokens, num_kv_heads, head_dim):
            raise ValueError(
                f"{name} must have the shape {(num_tokens, num_kv_heads, head_dim)}, "
                f"not {tuple(x.shape)}"
            )
    if head_dim > module.max_head_dim:
        raise ValueError(f"head_dim is {head_dim}; at most {module.max_head_dim} is supported")
    if not (caches is None) == (slot_mapping is None) == (v is None):
        raise ValueError("v, caches and slot_mapping come together or not at all")
    if (rotary is None) != (positions is None):
        raise ValueError("rotary and positions come together or not at all")
    q_arguments = (q.data_ptr(), *row_strides("q", q, (dtype,), device))
    k_arguments = (k.data_ptr(), *row_strides("k", k, ACT_TYPES, device))
    v_arguments = (0, 0, 0) if v is None else (v.data_ptr(), *row_strides("v", v, (dtype,), device))
    module.rotate_and_write(
        ACT_TYPES[dtype],
        *q_arguments,
        *q_arguments,
        *k_arguments,
        *v_arguments,
        *(k_arguments if is_k_kept else (0, 0, 0)),
        *_qk_norm_arguments(q_norm, k_norm, head_dim, device),
        *_rotary_arguments(rotary, positions, num_tokens, head_dim, device),
        *_cache_arguments(
            caches, slot_mapping, scales, (num_tokens, num_kv_heads, head_dim), device
        ),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        stream_of(k),
    )


def _head_shape(name: str, x: torch.Tensor) -> tuple[int, int, int]:
    if x.dim() != 3:
        raise ValueError(
            f"{name} must have the shape [num_tokens, num_heads, head_dim], not {tuple(x.shape)}"
        )
    num_tokens, num_heads, head_dim = x.shape
    return num_tokens, num_heads, head_dim


def _qk_norm_arguments(
    q_norm: NormParameters | None,
    k_norm: NormParameters | None,
    head_dim: int,
    device: torch.device,
) -> tuple[int, int, float, float]:
    q_weight, *q_constants = norm_arguments("q_norm", q_norm, head_dim, device)
    k_weight, *k_constants = norm_arguments("k_norm", k_norm, head_dim, device)
    if q_norm is not None and k_norm is not None and q_constants != k_constants:
        raise ValueError("q_norm and k_norm must have the same eps and weight_offset")
    eps, offset = q_constants if q_norm is not None else k_constants
    return q_weight, k_weight, eps, offset


def _rotary_arguments(
    rotary: RotaryParameters | None,
    positions: torch.Tensor | None,
    num_tokens: int,
    head_dim: int,
    device: torch.device,
) -> tuple[int, int, int, int, int, bool]:
    if rotary is None or positions is None:
        return 0, 0, 0, 0, 0, False
    max_positions, half_dim = rotary.cos.shape
    if 2 * half_dim > head_dim or max_positions == 0:
        raise ValueError(
            f"cos of shape {(max_positions, half_dim)} does not fit heads of {head_dim} values"
        )
    return (
        check("positions", positions, torch.int64, (num_tokens,), device),
        check("cos", rotary.cos, torch.float32, (max_positions, half_dim), device),
        check("sin", rotary.sin, torch.float32, (max_positions, half_dim), device),
        max_positions,
        half_dim,
        rotary.is_interleaved,
    )


def _cache_arguments(
    caches: tuple[torch.Tensor, torch.Tensor] | None,
    slot_mapping: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    shape: tuple[int, int, int],
    device: torch.device,
) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    """shape: num_tokens, num_kv_heads, head_dim."""
    if caches is None or slot_mapping is None:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0, 1
    num_tokens, num_kv_heads, head_dim = shape
    k_cache, v_cache = caches
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if (
            cache.dtype not in CACHE_TYPES
            or cache.dim() != 4
            or cache.shape[2:] != (num_kv_heads, head_dim)
            or not cache[:1].is_contiguous()
            or cache.device != device
        ):
            raise ValueError(
                f"{name} must be float32, float16, bfloat16 or float8_e4m3fn [num_blocks, "
                f"block_size, {num_kv_heads}, {head_dim}] on {device}, each block contiguous, "
                f"not {describe(cache)}"
            )
    if k_cache.dtype != v_cache.dtype or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must be alike, not {describe(k_cache)} and {describe(v_cache)}"
        )
    k_scales, v_scales = (
        check_optional("scales", x, torch.float32, (num_kv_heads,), device)
        for x in scales or (None, None)
    )
    return (
        k_cache.data_ptr(),
        k_cache.stride(0),
        k_scales,
        v_cache.data_ptr(),
        v_cache.stride(0),
        v_scales,
        CACHE_TYPES[k_cache.dtype],
        check("slot_mapping", slot_mapping, torch.int64, (num_tokens,), device),
        k_cache.shape[0],
        k_cache.shape[1],
    )
