"""Checkpoints that do not fit their config name the tensor; matrices are not copied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmserve.config import ModelConfig
from llmserve.errors import StartupError
from llmserve.files.model import open_model
from llmserve.kernels import CPUKernels, GGMLType
from llmserve.models import Weights, build_decoder, read_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LAYER = "model.layers.0."

Tensors = dict[str, torch.Tensor]


def make_tensors() -> Tensors:
    shapes = {
        "model.embed_tokens": (40, 32),
        "model.norm": (32,),
        "lm_head": (40, 32),
        LAYER + "input_layernorm": (32,),
        LAYER + "post_attention_layernorm": (32,),
        **{LAYER + f"self_attn.{name}_proj": (32, 32) for name in "qkvo"},
        LAYER + "mlp.gate_proj": (48, 32),
        LAYER + "mlp.up_proj": (48, 32),
        LAYER + "mlp.down_proj": (32, 48),
    }
    return {name + ".weight": torch.ones(shape) for name, shape in shapes.items()}


def load(folder: Path, tensors: Tensors, dtype: str = "auto", **config: Any) -> Weights:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    files = open_model(ModelConfig(model=str(folder)), lambda line: None)
    model, weights = read_model(files, dtype=dtype, load_format="auto", seed=0)
    build_decoder(model, weights, 64, CPUKernels())
    return weights


def _without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _without(LAYER + "mlp.up_proj.weight"),
            r"model.layers.0.mlp.up_proj.weight is missing; .* shape \(48, 32\)",
        ),
        (_without("model.norm.weight"), r"model.norm.weight is missing; .* shape \(32,\)"),
        (
            lambda t: t.update({LAYER + "self_attn.k_proj.weight": torch.ones(16, 32)}),
            r"k_proj.weight has shape \(16, 32\); the model needs \(32, 32\)",
        ),
        (
            lambda t: t.update({LAYER + "self_attn.q_proj.bias": torch.ones(32)}),
            r"1 tensors that this architecture does not have, such as .*q_proj.bias",
        ),
        (
            lambda t: t.update({"model.layers.1.input_layernorm.weight": torch.ones(32)}),
            r"model.layers.1.input_layernorm.weight of shape \(32,\)",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(40, 32, dtype=torch.float64)}),
            "lm_head.weight is of type F64; supported are F32, F16, BF16",
        ),
    ],
    ids=["missing matrix", "missing vector", "shape", "extra bias", "extra layer", "type"],
)
def test_checkpoint_that_does_not_fit_is_refused(
    change: Callable[[Tensors], Any], words: str, tmp_path: Path
) -> None:
    tensors = make_tensors()
    change(tensors)

    with pytest.raises(StartupError, match=words):
        load(tmp_path, tensors)


def test_tied_checkpoint_may_or_may_not_repeat_its_output_matrix(tmp_path: Path) -> None:
    tensors = make_tensors()

    load(tmp_path, tensors, tie_word_embeddings=True)
    del tensors["lm_head.weight"]
    load(tmp_path, tensors, tie_word_embeddings=True)

    with pytest.raises(StartupError, match=r"lm_head\.weight is missing"):
        load(tmp_path, tensors)


def test_inverse_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    tensors = make_tensors() | {LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(8)}

    load(tmp_path, tensors)


def test_matrix_is_a_view_of_the_file_in_its_stored_type(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["lm_head.weight"] = torch.arange(1280.0).view(40, 32).bfloat16()
    weights = load(tmp_path, tensors)

    first, second = (weights.matrix("output", 40, 32) for _ in range(2))

    assert first.type is GGMLType.BF16
    assert first.data.data_ptr() == second.data.data_ptr()
    assert torch.equal(first.data.view(torch.bfloat16), tensors["lm_head.weight"])


def test_dtype_converts_matrices_and_the_cache_follows(tmp_path: Path) -> None:
    assert load(tmp_path, make_tensors()).kv_dtype == "float32"
    for dtype, kind in (("float16", GGMLType.F16), ("bfloat16", GGMLType.BF16)):
        weights = load(tmp_path, make_tensors(), dtype)
        assert weights.matrix("q", 32, 32, 0).type is kind
        assert weights.kv_dtype == dtype
