"""Paged attention on CUDA, for decodes, prefill chunks and mixtures of both.

A row has the same bits alone or among any others: keys are divided by their positions and the
number that the row sees, and are summed in that order. Sequences with one query take kernels of
their own (docs/cuda_attention.md), in whatever batch; so a prompt's rows have the same bits in any
chunks but chunks of one token.

Nothing here waits for the device. Block ids and lengths in its memory are not checked: wrong ones
read or write outside the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from llmserve.kernels.checks import describe
from llmserve.kernels.cuda.checks import (
    ACT_TYPES,
    CACHE_TYPES,
    check,
    check_optional,
    row_strides,
    stream_of,
)

MAX_HEAD_DIM = 256


def attention_workspace(
    module: Any,
    q: torch.Tensor,
    num_seqs: int,
    max_seq_len: int,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Memory that paged_attention may use for calls up to these sizes: uint8, uninitialised.

    Grows with num_seqs and the rest only up to 64 parts a sequence: 256 sequences with 32 heads of
    128 take up to 273 MB. Calls in one stream may share it.
    """
    num_bytes = module.attention_workspace_bytes(
        num_seqs, q.shape[1], q.shape[2], max_seq_len, sliding_window or 0
    )
    return torch.empty(num_bytes, dtype=torch.uint8, device=q.device)


def paged_attention(
    module: Any,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a step's queries over the paged KV cache.

    q: float32, float16 or bfloat16 [num_tokens, num_heads, head_dim]; tokens and heads may be
    strided, rows begin at multiples of 16 bytes. k_cache, v_cache: these types or float8_e4m3fn,
    [num_blocks, block_size, num_kv_heads, head_dim], each block contiguous, a row a multiple of 16
    bytes. block_tables: int32 [num_seqs, max_blocks], rows may be strided. seq_lens: int32
    [num_seqs]; 0 is a padding sequence. cu_seqlens_q: int32 [num_seqs + 1].

    Query i of num_queries is at position p = seq_len - num_queries + i and sees the keys at
    max(0, p - sliding_window + 1) ... p. Scores are q @ k * scale, with logit_softcap c then
    c * tanh(scores / c). sinks: float32 [num_heads], added as exp(sink) to the softmax's
    denominator. k_scale, v_scale: float32 [num_kv_heads], what stored values are multiplied with.

    max_query_len, max_seq_len: at least those of all sequences; a graph is captured with the most
    that its replays have. workspace: attention_workspace() of these sizes or larger ones; a new one
    by default.

    Returns [num_tokens, num_heads * head_dim] of q's type: `out` if given (contiguous), else a new
    tensor. Rows that see no key and tokens behind the last sequence are zeros. Slots and table
    entries that no query of the same tile sees are not read. Raises ValueError for a wrong dtype,
    shape, layout or device.
    """
    cache_type = _check_caches(q, k_cache, v_cache)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = q.shape
    num_seqs = seq_lens.shape[0]
    device = q.device
    q_strides = _check_queries(q, num_kv_heads, head_dim)
    if (
        block_tables.dtype != torch.int32
        or block_tables.dim() != 2
        or block_tables.shape[0] != num_seqs
        or (block_tables.stride(1) != 1 and block_tables.shape[1] > 1)
        or block_tables.device != device
    ):
        raise ValueError(
            f"block_tables must be int32 [{num_seqs}, max_blocks] on {device} with adjacent "
            f"elements, not {describe(block_tables)}"
        )
    if not scale > 0.0:
        raise ValueError(f"scale is {scale}; it must be above 0")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1")
    if logit_softcap is not None and not logit_softcap > 0.0:
        raise ValueError(f"logit_softcap is {logit_softcap}; it must be above 0")
    if out is None:
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=device)
    if workspace is None:
        workspace = attention_workspace(module, q, num_seqs, max_seq_len, sliding_window)
    needed = module.attention_workspace_bytes(
        num_seqs, num_heads, head_dim, max_seq_len, sliding_window or 0
    )
    if workspace.nbytes < needed or workspace.device != device or not workspace.is_contiguous():
        raise ValueError(
            f"the workspace must be {needed} contiguous bytes on {device}, "
            f"not {describe(workspace)}"
        )
    module.paged_attention(
        q.data_ptr(),
        *q_strides,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.stride(0),
        check_optional("k_scale", k_scale, torch.float32, (num_kv_heads,), device),
        check_optional("v_scale", v_scale, torch.float32, (num_kv_heads,), device),
        check_optional("sinks", sinks, torch.float32, (num_heads,), device),
        block_tables.data_ptr(),
        block_tables.stride(0),
        check("seq_lens", seq_lens, torch.int32, (num_seqs,), device),
        check("cu_seqlens_q", cu_seqlens_q, torch.int32, (num_seqs + 1,), device),
        check("out", out, q.dtype, (num_tokens, num_heads * head_dim), device),
        workspace.data_ptr(),
        ACT_TYPES[q.dtype],
        cache_type,
        num_tokens,
        num_seqs,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        max_query_len,
        max_seq_len,
        sliding_window or 0,
        scale,
        logit_softcap or 0.0,
        stream_of(q),
    )
    return out


def _check_queries(q: torch.Tensor, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Strides of tokens and heads."""
    strides = row_strides("q", q, ACT_TYPES, q.device)
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q must be [num_tokens, num_heads, {head_dim}] with a multiple of {num_kv_heads} "
            f"heads for this cache, not {describe(q)}"
        )
    if any(stride * q.element_size() % 16 for stride in strides) or q.data_ptr() % 16:
        raise ValueError(f"rows of q must begin at multiples of 16 bytes, not {describe(q)}")
    return strides


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """The number of the cache's element type."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in CACHE_TYPES or cache.dim() != 4 or cache.device != q.device:
            raise ValueError(
                f"{name} must be float32, float16, bfloat16 or float8_e4m3fn "
                f"[num_blocks, block_size, num_kv_heads, head_dim] on {q.device}, "
                f"not {describe(cache)}"
            )
        if not cache[:1].is_contiguous():
            raise ValueError(f"each block of {name} must be contiguous, not {describe(cache)}")
        row_bytes = cache.shape[3] * cache.element_size()
        block_bytes = cache.stride(0) * cache.element_size()
        if row_bytes % 16 or block_bytes % 16 or cache.data_ptr() % 16:
            raise ValueError(
                f"rows of {name} must begin at multiples of 16 bytes, not {describe(cache)}"
            )
        if cache.shape[3] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {cache.shape[3]}; it must be at most {MAX_HEAD_DIM}")
    if k_cache.dtype != v_cache.dtype or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must be alike, not {describe(k_cache)} and {describe(v_cache)}"
        )
    return CACHE_TYPES[k_cache.dtype]
