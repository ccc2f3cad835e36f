"""Attention, norm, rotary embedding and activation in plain torch: what runs without the compiled
extension, and what it has to match.

Written to be read, not to be fast; arithmetic is in float64.
"""

from __future__ import annotations

import torch

_HALF_MAX = 65504.0


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores k and v, float32 [num_tokens, num_kv_heads, head_dim], in the slots of the cache."""
    block_size = k_cache.shape[1]
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    for x, cache in ((k, k_cache), (v, v_cache)):
        values = x[is_stored]
        if cache.dtype == torch.float16:
            values = values.clamp(-_HALF_MAX, _HALF_MAX)
        cache[slots // block_size, slots % block_size] = values.to(cache.dtype)


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
    """Causal attention of q, float32 [num_tokens, num_heads, head_dim], query by query.

    Returns float32 [num_tokens, num_heads * head_dim].
    """
    result = torch.empty(q.shape, dtype=torch.float64)
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    for seq, seq_len in enumerate(seq_lens.tolist()):
        begin, end = cu_seqlens_q[seq : seq + 2].tolist()
        for token in range(begin, end):
            position = seq_len - (end - token)
            first = max(0, position - sliding_window + 1) if sliding_window else 0
            seen = torch.arange(first, position + 1)
            blocks, offsets = block_tables[seq, seen // block_size].long(), seen % block_size
            k = k_cache[blocks, offsets].double().repeat_interleave(group, dim=1)
            v = v_cache[blocks, offsets].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,khd->hk", q[token].double(), k) * scale
            if logit_softcap:
                scores = logit_softcap * torch.tanh(scores / logit_softcap)
            result[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    flat = result.float().flatten(1)
    return flat if out is None else out.copy_(flat)


def copy_blocks(cache: torch.Tensor, block_copies: list[tuple[int, int]]) -> None:
    """Copies blocks of the cache, (source, target) pair after pair."""
    for source, target in block_copies:
        cache[target] = cache[source]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight_offset + weight) over the last dimension."""
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    result = (wide * scale * (weight_offset + weight.double())).float()
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    residual += x
    return rms_norm(residual, weight, eps, weight_offset=weight_offset, out=out)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool = False,
) -> None:
    """Rotates pairs of the first rotary_dim values of each head of q and k in place."""
    half_dim = cos.shape[1]
    c = cos[positions.long()].double().unsqueeze(1)
    s = sin[positions.long()].double().unsqueeze(1)
    for x in (q, k):
        rotated = x[..., : 2 * half_dim]
        if is_interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half_dim], rotated[..., half_dim:]
        new_first, new_second = first * c - second * s, second * c + first * s
        first.copy_(new_first)
        second.copy_(new_second)


def act_mul(
    gate_up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """activation(gate) * up of float32 [num_tokens, 2 * size], gate first."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        active = torch.nn.functional.silu(gate)
    elif activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        active = torch.nn.functional.gelu(gate, approximate=approximate)
    else:
        raise ValueError(f"activation is {activation!r}; known are silu, gelu_tanh, gelu")
    result = (active * up).float()
    return result if out is None else out.copy_(result)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cap * tanh(x / cap) in place; returns x."""
    return x.copy_(cap * torch.tanh(x.double() / cap))
