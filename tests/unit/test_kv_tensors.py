"""Where layers keep K and V."""

from __future__ import annotations

import torch

from llmserve.core import KVCacheGroup, KVCacheSpec
from llmserve.kernels import CPUKernels
from llmserve.runner.kv_tensors import KVTensors


def make_spec(dtype: str = "float32") -> KVCacheSpec:
    groups = (KVCacheGroup((1, 3)), KVCacheGroup((0, 2), 8), KVCacheGroup((4,), 8))
    return KVCacheSpec(groups, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype)


def test_layers_of_different_groups_share_the_tensor_of_their_slot() -> None:
    layers = KVTensors(make_spec(), 6, CPUKernels()).layers

    assert [layer.group_id for layer in layers] == [1, 0, 1, 0, 2]
    assert layers[0].k is layers[1].k is layers[4].k
    assert layers[2].v is layers[3].v
    assert layers[0].k is not layers[2].k
    assert layers[0].k.shape == (6, 4, 2, 8)


def test_memory_is_what_the_spec_says() -> None:
    spec = make_spec("bfloat16")
    layers = KVTensors(spec, 6, CPUKernels()).layers

    tensors = {id(t): t for layer in layers for t in (layer.k, layer.v)}

    assert sum(t.nbytes for t in tensors.values()) == 6 * spec.bytes_per_block


def test_copied_block_holds_the_source_for_every_layer() -> None:
    kv = KVTensors(make_spec(), 6, CPUKernels())
    for value, layer in enumerate(kv.layers):
        layer.k.fill_(value)
        layer.v.fill_(10 + value)
        layer.k[2] += 100
        layer.v[2] += 100

    kv.copy_blocks([(2, 5), (5, 1)])

    for layer in kv.layers:
        for cache in (layer.k, layer.v):
            assert torch.equal(cache[5], cache[2])
            assert torch.equal(cache[1], cache[2])
            assert not torch.equal(cache[3], cache[2])
