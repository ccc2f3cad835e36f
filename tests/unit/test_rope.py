"""Frequencies of each rope scaling against transformers' own functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmserve.kernels import rotary
from llmserve.layers import RotaryTable
from llmserve.layers.rotary import inverse_frequencies
from llmserve.models.hf_config import read_hf_config

HEAD_DIM = 64
MAX_POSITION = 4096

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + index / 10 for index in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + index for index in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 1024,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [3.0] * (HEAD_DIM // 2),
        "original_max_position_embeddings": 1024,
        "factor": 16.0,
    },
]


def make_config(**scaling: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 50_000.0} | scaling,
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("length", [900, 4096, 8192])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_equal_those_of_transformers(scaling: dict[str, Any], length: int) -> None:
    config = make_config(**scaling)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        make_config(**scaling), "cpu", seq_len=length
    )

    rope = read_hf_config(config.to_dict()).layers[0].rope

    assert rope is not None
    inv_freq, attention_factor = inverse_frequencies(rope, length)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("is_new_style", [True, False])
def test_both_styles_of_config_give_the_same_rope(is_new_style: bool) -> None:
    values = make_config(**SCALINGS[5]).to_dict()
    if not is_new_style:
        parameters = values.pop("rope_parameters")
        values["rope_theta"] = parameters.pop("rope_theta")
        values["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}

    rope = read_hf_config(values).layers[0].rope

    assert rope == read_hf_config(make_config(**SCALINGS[5]).to_dict()).layers[0].rope


def test_table_rotates_by_position_times_frequency() -> None:
    rope = read_hf_config(make_config().to_dict()).layers[0].rope
    assert rope is not None
    table = RotaryTable(rope, 3000, torch.device("cpu"))
    table.reserve(2501)
    q = torch.zeros(1, 1, HEAD_DIM)
    q[0, 0, 3] = 1.0

    cos, sin = table.parameters.cos, table.parameters.sin
    rotary(q, torch.zeros(1, 1, HEAD_DIM), torch.tensor([2500]), cos, sin)

    angle = 2500 * 50_000.0 ** (-3 / (HEAD_DIM // 2))
    assert q[0, 0, 3].item() == pytest.approx(math.cos(angle), abs=1e-4)
    assert q[0, 0, 3 + HEAD_DIM // 2].item() == pytest.approx(math.sin(angle), abs=1e-4)
