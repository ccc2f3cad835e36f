"""How the KV cache of a model is divided: runner -> kvcache.

Layers that keep the same tokens form groups of equal size, and a block is the memory of
`block_size` tokens for one group's layers. All groups draw from one pool of blocks, so memory
that sliding-window layers give back serves any other layer.

    layers      0  1  2  3  4  5      window 512 for 0 1 3 4, none for 2 5
    group 0           2        5      no window
    group 1     0  1                  window 512      each block holds two layers:
    group 2              3  4         window 512      tensor slot 0 and tensor slot 1
"""

from __future__ import annotations

from dataclasses import dataclass

_ITEM_BYTES = {"float32": 4, "fp8": 1}  # of all others: 2


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table. `layer_ids[i]` lives in tensor slot i of a block."""

    layer_ids: tuple[int, ...]
    sliding_window: int | None = None  # a query at p sees keys p - window + 1 .. p


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the cache. A block id is valid for every group; block 0 is never given out."""

    groups: tuple[KVCacheGroup, ...]
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "float16" | "bfloat16" | "fp8"

    @property
    def layers_per_group(self) -> int:
        return max(len(group.layer_ids) for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """K and V of `block_size` tokens for one group's layers."""
        per_token = 2 * self.num_kv_heads * self.head_dim * _ITEM_BYTES.get(self.dtype, 2)
        return per_token * self.block_size * self.layers_per_group


def group_layers(windows: list[int | None]) -> tuple[KVCacheGroup, ...]:
    """Groups layers by window (`windows[layer]`, None: no window), full attention first.

    The group size is the smaller kind's layer count, as in vLLM's hybrid KV cache manager; the
    last group of a kind may be short of layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer_id, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer_id)
    size = min(len(layer_ids) for layer_ids in kinds.values())
    groups = []
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):
        layer_ids = kinds[window]
        for start in range(0, len(layer_ids), size):
            groups.append(KVCacheGroup(tuple(layer_ids[start : start + size]), window))
    return tuple(groups)
