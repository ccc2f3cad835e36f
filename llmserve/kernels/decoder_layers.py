"""All layers of a decoder in one call of the compiled extension.

A step of one token spends 6 microseconds in Python for each kernel that needs 2 to 50, over a
hundred times; here it does so once. The kernels are those of the other modules, in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from llmserve import _cpu_kernels
from llmserve.kernels.attention import CACHE_TYPES, check_cache
from llmserve.kernels.checks import check, describe
from llmserve.kernels.elementwise import ACTIVATIONS
from llmserve.kernels.interface import Cache, StepInputs
from llmserve.kernels.layer_parameters import LayerParameters, NormParameters


class DecoderLayers:
    """Layers of equal sizes, one after the other."""

    def __init__(self, layers: Iterable[LayerParameters]) -> None:
        """Raises ValueError for norms that differ in more than their weights."""
        self._layers = list(layers)  # owns what the compiled layers point to
        self._compiled = _cpu_kernels.DecoderLayers()
        for layer in self._layers:
            _add(self._compiled, layer)
        self._caches: Sequence[Cache] = ()
        self._cache_table = self._group_table = torch.empty(0)
        self._last_call: tuple[object, ...] = ()
        self._arguments: tuple[int, ...] = ()

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        groups: Sequence[StepInputs],
        caches: Sequence[Cache],
        *,
        qkv: torch.Tensor,
        intermediate: torch.Tensor,
        attention_out: torch.Tensor,
        gate_up: torch.Tensor,
        mlp_out: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the last norm's result: `mlp_out`, or `residual` where there is no such norm.

        x, residual, attention_out, mlp_out: float32 [num_tokens, hidden_size], contiguous. The
        others have a row for each token, as wide as their values. x may be mlp_out. Objects that
        are passed again may have new numbers in them, but no other shapes or addresses. Raises
        ValueError for a wrong dtype, shape, layout or device, IndexError for a position, slot or
        block outside of its table; the memory is then undefined.
        """
        tensors = (x, residual, qkv, intermediate, attention_out, gate_up, mlp_out)
        call = (groups, caches, *tensors)
        # Decode steps come with the same tensors again and again, and checks are slow after a step
        # that has read all weights: nothing of Python is in the processor's cache then.
        if len(call) != len(self._last_call) or any(map(operator.is_not, call, self._last_call)):
            self._arguments = self._check(groups, caches, *tensors)
            self._last_call = call
        is_residual = self._compiled.run(*self._arguments)
        return residual if is_residual else mlp_out

    def _check(
        self,
        groups: Sequence[StepInputs],
        caches: Sequence[Cache],
        x: torch.Tensor,
        residual: torch.Tensor,
        qkv: torch.Tensor,
        intermediate: torch.Tensor,
        attention_out: torch.Tensor,
        gate_up: torch.Tensor,
        mlp_out: torch.Tensor,
    ) -> tuple[int, ...]:
        """The arguments of the compiled call, for as long as the tensors live."""
        self._last_call = ()
        first = self._layers[0]
        num_tokens, hidden_size = x.shape[0], first.output.num_rows
        for name, tensor in (
            ("x", x),
            ("residual", residual),
            ("attention_out", attention_out),
            ("mlp_out", mlp_out),
        ):
            check(name, tensor, torch.float32, (num_tokens, hidden_size))
        check("qkv", qkv, torch.float32, (num_tokens, first.qkv.num_rows))
        check("gate_up", gate_up, torch.float32, (num_tokens, first.gate_up.num_rows))
        width = max(first.output.num_cols, first.down.num_cols)
        check("intermediate", intermediate, torch.float32, (num_tokens, width))
        if caches is not self._caches:
            self._cache_table = self._make_cache_table(caches)
            self._caches = caches
        self._group_table = torch.tensor([_group_row(group, num_tokens) for group in groups])
        num_blocks, block_size, _, _ = caches[0].k.shape
        return (
            self._group_table.data_ptr(),
            self._cache_table.data_ptr(),
            CACHE_TYPES[caches[0].k.dtype],
            num_blocks,
            block_size,
            num_tokens,
            groups[0].seq_lens.numel(),
            qkv.data_ptr(),
            intermediate.data_ptr(),
            attention_out.data_ptr(),
            gate_up.data_ptr(),
            mlp_out.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
        )

    def _make_cache_table(self, caches: Sequence[Cache]) -> torch.Tensor:
        if len(caches) != len(self._layers):
            raise ValueError(f"{len(self._layers)} layers need as many caches, not {len(caches)}")
        rows = []
        for layer, cache in zip(self._layers, caches, strict=True):
            check_cache(cache.k, cache.v)
            if cache.k.shape != caches[0].k.shape or cache.k.dtype != caches[0].k.dtype:
                raise ValueError("the caches of all layers must be alike")
            if tuple(cache.k.shape[2:]) != (layer.num_kv_heads, layer.head_dim):
                raise ValueError(
                    f"a cache of {layer.num_kv_heads} KV heads with head_dim {layer.head_dim} is "
                    f"needed, not {describe(cache.k)}"
                )
            k, v = cache.k, cache.v
            rows.append([cache.group_id, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)])
        return torch.tensor(rows)


def _group_row(group: StepInputs, num_tokens: int) -> list[int]:
    num_seqs = group.seq_lens.numel()
    tables = group.block_tables
    check("positions", group.positions, torch.int64, (num_tokens,))
    check("slot_mapping", group.slot_mapping, torch.int64, (num_tokens,))
    check("seq_lens", group.seq_lens, torch.int32, (num_seqs,))
    check("cu_seqlens_q", group.cu_seqlens_q, torch.int32, (num_seqs + 1,))
    if tables.dtype != torch.int32 or tables.dim() != 2 or len(tables) != num_seqs:
        raise ValueError(
            f"block_tables must be int32 [num_seqs, max_blocks], not {describe(tables)}"
        )
    if tables.shape[1] > 1 and tables.stride(1) != 1:
        raise ValueError(f"block_tables must have adjacent elements, not {describe(tables)}")
    return [
        group.positions.data_ptr(),
        group.slot_mapping.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        tables.shape[1],
        group.seq_lens.data_ptr(),
        group.cu_seqlens_q.data_ptr(),
    ]


def _add(layers: _cpu_kernels.DecoderLayers, layer: LayerParameters) -> None:
    constants = {(norm.eps, norm.weight_offset) for norm in layer.norms} or {(0.0, 0.0)}
    if len(constants) > 1:
        raise ValueError(f"the norms of a layer must have one eps and offset, not {constants}")
    ((eps, weight_offset),) = constants
    rotary = layer.rotary
    layers.add(
        qkv=layer.qkv.table.data_ptr(),
        num_qkv=len(layer.qkv.table),
        output=layer.output.table.data_ptr(),
        gate_up=layer.gate_up.table.data_ptr(),
        num_gate_up=len(layer.gate_up.table),
        down=layer.down.table.data_ptr(),
        q_norm=_address(layer.q_norm),
        k_norm=_address(layer.k_norm),
        is_qk_norm_per_head=layer.is_qk_norm_per_head,
        cos=0 if rotary is None else rotary.cos.data_ptr(),
        sin=0 if rotary is None else rotary.sin.data_ptr(),
        max_positions=0 if rotary is None else rotary.cos.shape[0],
        half_dim=0 if rotary is None else rotary.cos.shape[1],
        is_interleaved=rotary is not None and rotary.is_interleaved,
        post_attention_norm=_address(layer.post_attention_norm),
        pre_mlp_norm=_address(layer.pre_mlp_norm),
        post_mlp_norm=_address(layer.post_mlp_norm),
        next_norm=_address(layer.next_norm),
        norm_eps=eps,
        norm_weight_offset=weight_offset,
        residual_scale=layer.residual_scale,
        activation=ACTIVATIONS[layer.activation],
        hidden_size=layer.output.num_rows,
        intermediate_size=layer.down.num_cols,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        attention_scale=layer.attention_scale,
        sliding_window=layer.sliding_window or 0,
        logit_softcap=layer.logit_softcap or 0.0,
    )


def _address(norm: NormParameters | None) -> int:
    if norm is None:
        return 0
    check("norm weight", norm.weight, torch.float32, (norm.weight.numel(),))
    return norm.weight.data_ptr()
