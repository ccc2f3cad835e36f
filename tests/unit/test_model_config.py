"""config.json and GGUF metadata become one DecoderConfig, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.errors import StartupError
from llmserve.files.gguf import GGUFFile
from llmserve.layers import RopeKind
from llmserve.models import DecoderConfig
from llmserve.models.gguf_config import read_gguf_config
from llmserve.models.hf_config import read_hf_config


def make_config(architecture: str = "LlamaForCausalLM", **others: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        **others,
    }


def windows(config: DecoderConfig) -> list[int | None]:
    return [layer.sliding_window for layer in config.layers]


def test_llama_has_one_rope_and_no_window() -> None:
    config = read_hf_config(make_config(rope_theta=500_000.0, sliding_window=16))

    assert windows(config) == [None] * 6
    assert {layer.rope.theta for layer in config.layers if layer.rope} == {500_000.0}
    assert config.head_dim == 16
    assert config.attention_scale == 0.25


def test_absent_window_of_mistral_is_4096_and_null_is_none() -> None:
    assert windows(read_hf_config(make_config("MistralForCausalLM"))) == [4096] * 6
    null = make_config("MistralForCausalLM", sliding_window=None)
    assert windows(read_hf_config(null)) == [None] * 6


def test_qwen2_slides_from_max_window_layers_on_only_when_told_to() -> None:
    sizes: dict[str, Any] = {"sliding_window": 32, "max_window_layers": 4}
    off = make_config("Qwen2ForCausalLM", **sizes)
    on = make_config("Qwen2ForCausalLM", use_sliding_window=True, **sizes)

    assert windows(read_hf_config(off)) == [None] * 6
    assert windows(read_hf_config(on)) == [None] * 4 + [32] * 2
    assert read_hf_config(on).has_qkv_bias
    assert not read_hf_config(on).has_output_bias


def test_gemma3_mixes_windows_and_rope_bases_in_both_styles_of_config() -> None:
    old = make_config(
        "Gemma3ForCausalLM",
        head_dim=16,
        sliding_window=32,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = make_config(
        "Gemma3ForCausalLM",
        head_dim=16,
        sliding_window=32,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )

    config = read_hf_config(old)

    assert config.layers == read_hf_config(new).layers
    assert windows(config) == [32] * 5 + [None]
    ropes = [layer.rope for layer in config.layers]
    assert ropes[0] is not None
    assert ropes[5] is not None
    assert (ropes[0].theta, ropes[0].kind) == (1e4, RopeKind.DEFAULT)
    assert (ropes[5].theta, ropes[5].kind, ropes[5].factor) == (1e6, RopeKind.LINEAR, 8.0)
    assert config.max_context == 2048
    assert config.norm_weight_offset == 1.0


def test_scaled_rope_stretches_the_context() -> None:
    linear = make_config(rope_scaling={"type": "linear", "factor": 4.0})
    yarn = make_config(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    )

    assert read_hf_config(linear).max_context == 8192
    assert read_hf_config(yarn).max_context == 8192


def test_every_fourth_layer_of_smollm3_has_no_positions() -> None:
    config = read_hf_config(make_config("SmolLM3ForCausalLM"))

    assert [layer.rope is not None for layer in config.layers] == [True] * 3 + [False] + [True] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM' is not supported"),
        ({"architectures": None}, "supported are Gemma2ForCausalLM"),
        ({"architectures": [["x"]]}, "is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size is -64; it must be between 1"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 66}, "a divisor of the hidden size"),
        ({"hidden_size": 1 << 30}, "hidden_size is 1073741824"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads, which 3"),
        ({"head_dim": 512}, "head_dim is 512; it must be between 1 and 256"),
        ({"head_dim": 15}, "must be an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type is 'mrope'; it must be one of"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]; it must be an object"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "mixtures of experts are not supported"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"text_config": 3}, "text_config is not an object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_config_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    values = make_config() | changes

    with pytest.raises(StartupError) as caught:
        read_hf_config(values)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_lists_of_a_config_are_refused() -> None:
    layers = make_config("Gemma2ForCausalLM", layer_types=["linear_attention"] * 6)
    longrope = make_config(
        "Phi3ForCausalLM",
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
    )

    with pytest.raises(StartupError, match="layer_types"):
        read_hf_config(layers)
    with pytest.raises(StartupError, match=r"long_factor.*a list of 8 numbers"):
        read_hf_config(longrope)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_KEYS = (
    *make_config(),
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "no_rope_layers",
    "hidden_act",
    "text_config",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "tie_word_embeddings",
)


@settings(max_examples=150, deadline=None)
@given(
    architecture=st.sampled_from(
        ["LlamaForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM"]
    ),
    changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4),
)
def test_any_json_gives_a_config_or_a_startup_error(
    architecture: str, changes: dict[str, Any]
) -> None:
    try:
        config = read_hf_config(make_config(architecture) | changes)
    except StartupError:
        return
    assert config.num_layers <= 4096


def make_gguf(path: Path, family: str, **others: Any) -> GGUFFile:
    """Metadata and an embedding; no other tensors."""
    values: dict[str, Any] = {
        "context_length": 2048,
        "embedding_length": 64,
        "block_count": 6,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {key.replace("__", "."): value for key, value in others.items()}
    writer = gguf.GGUFWriter(path, family)
    for key, value in values.items():
        writer.add_key_value(f"{family}.{key}", value, _value_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(path)


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT32
    return gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32


def test_gguf_of_gemma3_has_the_pattern_and_local_base_that_the_file_does_not_say(
    tmp_path: Path,
) -> None:
    file = make_gguf(
        tmp_path / "m.gguf",
        "gemma3",
        attention__sliding_window=512,
        attention__key_length=32,
        attention__value_length=32,
        rope__freq_base=1e6,
    )

    config = read_gguf_config(file)

    assert windows(config) == [512] * 5 + [None]
    assert [layer.rope.theta for layer in config.layers if layer.rope] == [1e4] * 5 + [1e6]
    assert config.norm_weight_offset == 0.0
    assert config.embedding_scale == 8.0
    assert config.is_tied


def test_gguf_of_llama_has_interleaved_rope(tmp_path: Path) -> None:
    for family, is_interleaved in (("llama", True), ("qwen2", False)):
        config = read_gguf_config(make_gguf(tmp_path / family, family))
        assert config.layers[0].rope is not None
        assert config.layers[0].rope.is_interleaved is is_interleaved


def test_equal_counts_per_layer_of_a_gguf_count_as_one(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", "llama", attention__head_count_kv=[2] * 6)

    assert read_gguf_config(file).num_kv_heads == 2


@pytest.mark.parametrize(
    ("family", "others", "words"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported"),
        ("llama", {"expert_count": 8}, "mixtures of experts"),
        ("llama", {"block_count": 0}, "llama.block_count is 0"),
        ("llama", {"block_count": "6"}, "llama.block_count is '6'; it must be an integer"),
        ("llama", {"attention__value_length": 8}, "must be the key length, 16"),
        ("llama", {"rope__scaling__type": "x"}, "rope.scaling.type is 'x'"),
        ("llama", {"rope__dimension_count": 7}, "even number"),
        ("llama", {"attention__head_count": 5}, "a divisor of the hidden size"),
    ],
)
def test_bad_gguf_metadata_is_refused_in_one_sentence(
    family: str, others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=words):
        read_gguf_config(make_gguf(tmp_path / "m.gguf", family, **others))
