"""Paged attention over the KV cache, and what writes that cache.

This module checks; the compiled extension computes. Every row of the result has the same bits
alone or among any others, with its prompt in one chunk or in many, on any number of threads: keys
are reduced in ranges of fixed positions, and ranges are merged in ascending order.
"""

from __future__ import annotations

import torch

from llmserve import _cpu_kernels
from llmserve.kernels.checks import check, describe, output

CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _check_heads(name: str, x: torch.Tensor) -> None:
    if x.dtype != torch.float32 or x.dim() != 3 or x.stride(2) != 1 or not x.is_cpu:
        raise ValueError(
            f"{name} must be float32 [num_tokens, num_heads, head_dim] in CPU memory with adjacent "
            f"elements, not {describe(x)}"
        )


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Returns the number of the cache's element type."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in CACHE_TYPES or cache.dim() != 4 or not cache.is_cpu:
            raise ValueError(
                f"{name} must be float32, float16 or bfloat16 "
                "[num_blocks, block_size, num_kv_heads, head_dim] in CPU memory, "
                f"not {describe(cache)}"
            )
        _, _, num_kv_heads, head_dim = cache.shape
        strides = (num_kv_heads * head_dim, head_dim, 1)
        # The second look costs more and is needed where a dimension is 1, its stride being free.
        if cache.stride()[1:] != strides and not cache[:1].is_contiguous():
            raise ValueError(f"each block of {name} must be contiguous, not {describe(cache)}")
    if k_cache.dtype != v_cache.dtype or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must be alike, not {describe(k_cache)} and {describe(v_cache)}"
        )
    return CACHE_TYPES[k_cache.dtype]


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores K and V of a step's tokens in their slots.

    k, v: float32 [num_tokens, num_kv_heads, head_dim]; tokens and heads may be strided.
    k_cache, v_cache: float32, float16 or bfloat16 [num_blocks, block_size, num_kv_heads,
    head_dim], each block contiguous. slot_mapping: int32 or int64 [num_tokens], contiguous:
    block_id * block_size + offset, or -1 for a token that is not stored.

    Rounds to the nearest, ties to even; beyond the range of float16 to +-65504. Raises ValueError
    for a wrong dtype, shape, layout or device and IndexError for a slot outside the cache.
    """
    _check_heads("k", k)
    _check_heads("v", v)
    cache_type = check_cache(k_cache, v_cache)
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens = k.shape[0]
    if k.shape != (num_tokens, num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(
            f"k and v must have the shape {(num_tokens, num_kv_heads, head_dim)} "
            f"for this cache, not {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if (
        slot_mapping.dtype not in (torch.int32, torch.int64)
        or slot_mapping.shape != (num_tokens,)
        or not slot_mapping.is_contiguous()
        or not slot_mapping.is_cpu
    ):
        raise ValueError(
            f"slot_mapping must be contiguous int32 or int64 of shape {(num_tokens,)}, "
            f"not {describe(slot_mapping)}"
        )
    _cpu_kernels.write_kv(
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.data_ptr(),
        v_cache.stride(0),
        cache_type,
        num_blocks,
        block_size,
        slot_mapping.data_ptr(),
        slot_mapping.dtype == torch.int64,
        num_tokens,
        num_kv_heads,
        head_dim,
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a step's queries, decodes and prefill chunks alike.

    q: float32 [num_tokens, num_heads, head_dim]; tokens and heads may be strided.
    k_cache, v_cache: as in write_kv, with the step's K and V already written; num_kv_heads divides
    num_heads, and query head h uses KV head h * num_kv_heads // num_heads.
    block_tables: int32 [num_seqs, max_blocks]; rows may be strided.
    seq_lens: int32 [num_seqs]: tokens of context, those of this step included.
    cu_seqlens_q: int32 [num_seqs + 1], from 0 to num_tokens.

    Query i of num_queries is at position p = seq_len - num_queries + i and sees the keys at
    max(0, p - sliding_window + 1) ... p. Scores are q @ k * scale, with logit_softcap c then
    c * tanh(scores / c). Slots and table entries that no query sees are not read.

    Returns float32 [num_tokens, num_heads * head_dim]: `out` if given (contiguous), else a new
    tensor. Raises ValueError for a wrong dtype, shape, layout, device or lengths that contradict
    each other and IndexError for a block outside the cache; `out` is then undefined.
    """
    _check_heads("q", q)
    cache_type = check_cache(k_cache, v_cache)
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = q.shape
    if q.shape[2] != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"q of shape {tuple(q.shape)} does not fit a cache of {num_kv_heads} KV heads "
            f"with head_dim {head_dim}"
        )
    if (
        block_tables.dtype != torch.int32
        or block_tables.dim() != 2
        or (block_tables.stride(1) != 1 and block_tables.shape[1] > 1)
        or not block_tables.is_cpu
    ):
        raise ValueError(
            "block_tables must be int32 [num_seqs, max_blocks] in CPU memory with adjacent "
            f"elements, not {describe(block_tables)}"
        )
    num_seqs, max_blocks = block_tables.shape
    check("seq_lens", seq_lens, torch.int32, (num_seqs,))
    check("cu_seqlens_q", cu_seqlens_q, torch.int32, (num_seqs + 1,))
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1")
    if logit_softcap is not None and not logit_softcap > 0.0:
        raise ValueError(f"logit_softcap is {logit_softcap}; it must be above 0")
    out = output(out, (num_tokens, num_heads * head_dim))
    _cpu_kernels.paged_attention(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.data_ptr(),
        v_cache.stride(0),
        cache_type,
        num_blocks,
        block_size,
        block_tables.data_ptr(),
        block_tables.stride(0),
        max_blocks,
        seq_lens.data_ptr(),
        cu_seqlens_q.data_ptr(),
        out.data_ptr(),
        num_tokens,
        num_seqs,
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        sliding_window or 0,
        logit_softcap or 0.0,
    )
    return out


def copy_blocks(cache: torch.Tensor, block_copies: list[tuple[int, int]]) -> None:
    """Copies whole blocks, (source, target) pair after pair.

    cache: any dtype, [num_blocks, ...], each block contiguous. Raises ValueError for another
    layout or device and IndexError for a block outside the cache.
    """
    if cache.dim() < 1 or not cache[:1].is_contiguous() or not cache.is_cpu:
        raise ValueError(f"each block of the cache must be contiguous, not {describe(cache)}")
    _cpu_kernels.copy_blocks(
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        cache[:1].nbytes,
        cache.shape[0],
        block_copies,
    )
