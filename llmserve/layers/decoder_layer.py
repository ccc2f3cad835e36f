"""A decoder layer, and all of them in a row.

The CPU's compiled kernels run all layers in one call; `DecoderLayer` is the same in Python, to be
read, and to run everywhere else. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmserve.kernels import Kernels, KVScales, LayerParameters
from llmserve.layers.attention import Attention, AttentionInputs
from llmserve.layers.linear import INTERMEDIATE
from llmserve.layers.mlp import MLP
from llmserve.layers.norm import AddNorm
from llmserve.layers.scratch import Scratch


class LayerCache(NamedTuple):
    """Where a layer keeps K and V: [num_blocks, block_size, num_kv_heads, head_dim] each."""

    group_id: int
    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None = None


class DecoderLayer:
    """Attention and feed-forward block, each followed by a step of the residual stream."""

    def __init__(
        self, attention: Attention, after_attention: AddNorm, mlp: MLP, after_mlp: AddNorm
    ) -> None:
        self.attention = attention
        self.after_attention = after_attention
        self.mlp = mlp
        self.after_mlp = after_mlp

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
    ) -> torch.Tensor:
        """x: this layer's normalised input; returns the next one's. `residual` grows in place."""
        x = self.attention(x, inputs, cache)
        x = self.after_attention(x, residual)
        return self.after_mlp(self.mlp(x), residual)


class LayerStack:
    """All layers of a decoder. Every layer has the same sizes."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], scratch: Scratch) -> None:
        self.layers = list(layers)
        self._scratch = scratch
        self._compiled = kernels.compile_layers(map(_describe, layers))

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        groups: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """x: the first layer's normalised input; returns the last norm's result, in scratch memory
        or in `residual`, which grows in place. [num_tokens, hidden_size] each.

        groups: one per KV cache group. caches: one per layer.
        """
        if self._compiled is None:
            return self.run_in_python(x, residual, groups, caches)
        num_tokens = x.shape[0]
        first = self.layers[0]
        take = self._scratch.take
        num_intermediate = max(first.attention.output.num_cols, first.mlp.down.num_cols)
        return self._compiled.run(
            x,
            residual,
            groups,
            caches,
            qkv=take("qkv", num_tokens, first.attention.qkv.num_rows),
            intermediate=take(INTERMEDIATE, num_tokens, num_intermediate),
            attention_out=take("o", num_tokens, residual.shape[1]),
            gate_up=take("gate_up", num_tokens, first.mlp.gate_up.num_rows),
            mlp_out=take("down", num_tokens, residual.shape[1]),
        )

    def run_in_python(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        groups: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """The same, one kernel at a time."""
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, residual, groups[cache.group_id], cache)
        return x


def _describe(layer: DecoderLayer) -> LayerParameters:
    attention, mlp = layer.attention, layer.mlp
    q_norm, k_norm = attention.qk_norms
    rotary = attention.rotary
    return LayerParameters(
        qkv=attention.qkv.weights,
        output=attention.output.weights,
        gate_up=mlp.gate_up.weights,
        down=mlp.down.weights,
        q_norm=q_norm,
        k_norm=k_norm,
        is_qk_norm_per_head=attention.qk_norm_per_head,
        rotary=None if rotary is None else rotary.parameters,
        post_attention_norm=layer.after_attention.post,
        pre_mlp_norm=layer.after_attention.pre,
        post_mlp_norm=layer.after_mlp.post,
        next_norm=layer.after_mlp.pre,
        residual_scale=layer.after_mlp.scale,
        activation=mlp.activation,
        num_heads=attention.shape.num_heads,
        num_kv_heads=attention.shape.num_kv_heads,
        head_dim=attention.shape.head_dim,
        attention_scale=attention.shape.scale,
        sliding_window=attention.shape.sliding_window,
        logit_softcap=attention.shape.logit_softcap,
    )
