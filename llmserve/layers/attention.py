"""Self-attention over a paged KV cache (Kwon et al. 2023, arXiv 2309.06180)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmserve.kernels import Cache, Kernels, NormParameters
from llmserve.layers.linear import INTERMEDIATE, Linear
from llmserve.layers.norm import RMSNorm
from llmserve.layers.rotary import RotaryTable
from llmserve.layers.scratch import Scratch


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention needs to know of a step; the same for all layers of a KV cache group."""

    positions: torch.Tensor  # int64 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens], where this step's K and V go
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    seq_lens: torch.Tensor  # int32 [num_seqs], tokens of the context, this step's included
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], where each sequence's tokens begin
    max_query_len: int  # most tokens of a sequence in the step
    max_seq_len: int  # no sequence has a longer context


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and constants of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None


class Attention:
    """Projections, optional norms of q and k, rotary embedding, attention, output projection.

    `qk_norm_per_head`: the norms run over each head (Qwen 3, Gemma 3), else over all heads of a
    token at once (OLMo 2). `rotary` is None in layers without positions.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: AttentionShape,
        qkv: Linear,
        output: Linear,
        rotary: RotaryTable | None,
        scratch: Scratch,
        qk_norms: tuple[RMSNorm, RMSNorm] | None = None,
        *,
        qk_norm_per_head: bool = True,
    ) -> None:
        self._kernels = kernels
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.rotary = rotary
        self._scratch = scratch
        self._norms = qk_norms
        self.qk_norm_per_head = qk_norm_per_head

    def __call__(self, x: torch.Tensor, inputs: AttentionInputs, cache: Cache) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; returns the same shape, in scratch memory.

        This step's K and V are written to the cache first.
        """
        q, k, v = self._project(x)
        norms = self.qk_norms if self.qk_norm_per_head else (None, None)
        rotary = None if self.rotary is None else self.rotary.parameters
        self._kernels.rotate_and_write_kv(q, k, v, *norms, rotary, cache, inputs)
        attended = self._kernels.paged_attention(
            q,
            cache,
            inputs,
            scale=self.shape.scale,
            sliding_window=self.shape.sliding_window,
            logit_softcap=self.shape.logit_softcap,
            out=self._scratch.take(INTERMEDIATE, x.shape[0], self.output.num_cols),
        )
        return self.output(attended)

    @property
    def qk_norms(self) -> tuple[NormParameters | None, NormParameters | None]:
        if self._norms is None:
            return None, None
        return self._norms[0].parameters, self._norms[1].parameters

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [num_tokens, num_heads, head_dim], k and v with num_kv_heads."""
        shape = self.shape
        num_q, num_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        q, k, v = self.qkv(x).split_with_sizes((num_q, num_kv, num_kv), 1)
        if self._norms is not None and not self.qk_norm_per_head:
            q_norm, k_norm = self._norms
            q, k = q_norm(q), k_norm(k)
        q = q.view(-1, shape.num_heads, shape.head_dim)
        k = k.view(-1, shape.num_kv_heads, shape.head_dim)
        v = v.view(-1, shape.num_kv_heads, shape.head_dim)
        return q, k, v
