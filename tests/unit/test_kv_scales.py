"""Scales of K and V in checkpoints: their names, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmserve.errors import StartupError
from llmserve.files.safetensors import TensorInfo
from llmserve.models.kv_scales import StoredKVScales

ATTENTION = "model.layers.3.self_attn"
NUM_KV_HEADS = 2
BOTH = {"k_scale": 0.5, "v_scale": 0.25}
CODES = {"float32": "F32", "float16": "F16", "int8": "I8"}


def stored(values: dict[str, Any], **settings: Any) -> StoredKVScales:
    """values: by the name behind the attention module's; numbers become float32."""
    arrays = {
        f"{ATTENTION}.{name}": np.asarray(value, getattr(value, "dtype", np.float32))
        for name, value in values.items()
    }
    tensors = {
        name: TensorInfo(name, CODES[str(array.dtype)], array.shape, 0, array.nbytes)
        for name, array in arrays.items()
    }
    return StoredKVScales(
        {"quantization_config": settings},
        tensors,
        lambda name: np.frombuffer(arrays[name].tobytes(), np.uint8),
    )


@pytest.mark.parametrize(
    "values",
    [
        BOTH,
        {"attn.k_scale": 0.5, "attn.v_scale": 0.25},
        {"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25},
        {"qkv_proj.k_scale": 0.5, "qkv_proj.v_scale": 0.25},
        {"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25},
        {"k_scale": [0.5], "v_scale": np.full((1, 1), 0.25, np.float16)},
        {"k_scale": np.full((2, 1, 1), 0.5, np.float32), "v_scale": [0.25, 0.25]},
        BOTH | {"q_scale": 3.0, "prob_scale": 3.0, "kv_scale": 7.0},
    ],
    ids=" ".join,
)
def test_scales_are_found_by_the_names_that_tools_give_them(values: dict[str, Any]) -> None:
    scales = stored(values)

    found = scales.read(ATTENTION, NUM_KV_HEADS)

    assert found is not None
    assert found.k.tolist() == [0.5, 0.5]
    assert found.v.tolist() == [0.25, 0.25]
    assert all(scales.owns(f"{ATTENTION}.{name}") for name in values)


def test_one_scale_may_be_for_both_and_heads_may_have_their_own() -> None:
    common = stored({"attn.kv_scale": 2.0}).read(ATTENTION, NUM_KV_HEADS)
    own = stored({"k_scale": [1.0, 2.0], "v_scale": [3.0, 4.0]}).read(ATTENTION, NUM_KV_HEADS)

    assert common is not None
    assert own is not None
    assert (common.k.tolist(), common.v.tolist()) == ([2.0, 2.0], [2.0, 2.0])
    assert (own.k.tolist(), own.v.tolist()) == ([1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": "static"},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
        {"kv_cache_quant_algo": "FP8"},
    ],
)
def test_checkpoint_without_scales_has_none(settings: dict[str, Any]) -> None:
    assert stored({}, **settings).read(ATTENTION, NUM_KV_HEADS) is None
    assert stored(BOTH, **settings).read("model.layers.4.self_attn", NUM_KV_HEADS) is None
    assert stored(BOTH, **settings).read(ATTENTION, NUM_KV_HEADS) is not None


def test_other_tensors_are_no_scales() -> None:
    scales = stored({})

    assert not scales.owns("model.layers.3.self_attn.k_proj.weight_scale")
    assert not scales.owns("model.layers.3.self_attn.k_proj.bias")
    assert not scales.owns("model.layers.3.mlp.k_scale")
    assert not scales.owns("k_scale")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"k_scale": 1.0}, "self_attn.v_scale is missing, though there is"),
        ({"v_proj.v_scale": 1.0}, "self_attn.k_scale is missing, though there is"),
        (BOTH | {"k_scale": [1.0] * 4}, "k_scale is F32 (4,); the model needs"),
        (BOTH | {"v_scale": []}, "v_scale is F32 (0,); the model needs"),
        (BOTH | {"v_scale": np.ones(2, np.int8)}, "v_scale is I8 (2,); the model needs"),
        (BOTH | {"k_scale": 0.0}, "k_scale holds 0; a scale must be a number above 0"),
        (BOTH | {"k_scale": [1.0, -2.0]}, "k_scale holds -2; a scale must be"),
        (BOTH | {"v_scale": float("nan")}, "v_scale holds nan; a scale must be"),
        (BOTH | {"v_scale": [1.0, float("inf")]}, "v_scale holds inf; a scale must be"),
    ],
)
def test_scales_that_cannot_be_used_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError) as caught:
        stored(values).read(ATTENTION, NUM_KV_HEADS)

    assert words in str(caught.value)
    assert ATTENTION in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_scheme": {"num_bits": 4}}, "num_bits of kv_cache_scheme is 4"),
        ({"kv_cache_scheme": {"type": "int"}}, "type of kv_cache_scheme is 'int'"),
        ({"kv_cache_scheme": {"dynamic": True}}, "dynamic of kv_cache_scheme is True"),
        ({"kv_cache_scheme": {"symmetric": False}}, "symmetric of kv_cache_scheme is False"),
        ({"kv_cache_scheme": {"strategy": "token"}}, "strategy of kv_cache_scheme is 'token'"),
        ({"kv_cache_scheme": ["static"]}, "kv_cache_scheme is ['static']"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
    ],
)
def test_scales_of_other_types_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError) as caught:
        stored(BOTH, **settings).read(ATTENTION, NUM_KV_HEADS)

    assert f"config.json: {words}; a KV cache of fp8 needs" in str(caught.value)
