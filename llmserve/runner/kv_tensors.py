"""The memory of the KV cache: one K and one V tensor per tensor slot of a block.

A block id is a position in all of these tensors; which layers read it is the block's group's
affair (see core/kv.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmserve.core import KVCacheSpec
from llmserve.kernels import Kernels, KVScales
from llmserve.models import LayerCache

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


class KVTensors:
    """`layers[layer_id]` is where a layer keeps its K and V."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        kernels: Kernels,
        scales: Sequence[KVScales | None] | None = None,
    ) -> None:
        """scales: by layer, for a cache of fp8; None: values are stored as they are."""
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        caches = kernels.allocate_caches(2 * spec.layers_per_group, shape, _DTYPES[spec.dtype])
        self._copier = kernels.block_copier(caches)
        tensors = list(zip(caches[::2], caches[1::2], strict=True))
        placed = {
            layer_id: LayerCache(
                group_id, *tensors[slot], None if scales is None else scales[layer_id]
            )
            for group_id, group in enumerate(spec.groups)
            for slot, layer_id in enumerate(group.layer_ids)
        }
        self.layers: Sequence[LayerCache] = [placed[layer_id] for layer_id in sorted(placed)]

    def copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        """Copies the content of blocks, (source, target) pairs, for all layers."""
        self._copier.copy(block_copies)
