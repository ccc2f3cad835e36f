"""Checkpoints of AWQ, GPTQ, int8 and fp8 give the logits of their dequantised matrices."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmserve.errors import StartupError
from llmserve.files.safetensors import SafetensorsFiles
from llmserve.kernels import GGMLType, Weight, dequantize
from llmserve.kernels.packed_weight import (
    AWQWeight,
    FP8Weight,
    GPTQWeight,
    Int8Weight,
    PackedWeight,
)
from llmserve.kernels.repack import as_ggml
from llmserve.models.hf_config import read_hf_config
from llmserve.models.quantization import read_quantization
from llmserve.models.weights import CheckpointWeights
from tests.golden.conftest import Checkpoint
from tests.golden.forward import compute_logits
from tests.golden.tiny_engine import make_prompts
from tests.kernels.packed_builders import (
    pack_nibbles,
    random_awq,
    random_fp8,
    random_gptq,
    random_int8,
)
from tests.make_checkpoints import VOCAB_SIZE

(PROMPT,) = make_prompts([40], VOCAB_SIZE, seed=1)
Maker = Callable[[int, int, int], PackedWeight]


def _tensors_of(weight: PackedWeight) -> dict[str, torch.Tensor]:
    if isinstance(weight, AWQWeight):
        return {"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales}
    if isinstance(weight, GPTQWeight):
        tensors = {"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales}
        # Some tools add a bias of zeros to every matrix.
        tensors["bias"] = torch.zeros(weight.num_rows)
        return tensors if weight.g_idx is None else tensors | {"g_idx": weight.g_idx}
    if isinstance(weight, FP8Weight) and weight.block is not None:
        return {"weight": weight.data, "weight_scale_inv": weight.scales}
    tensors = {"weight": weight.data, "weight_scale": weight.scales}
    if isinstance(weight, FP8Weight) and weight.scales.numel() == 1:
        tensors |= {"weight_scale": weight.scales.view(()), "input_scale": torch.tensor(0.5)}
    return tensors


def _smaller(weight: Int8Weight | FP8Weight) -> PackedWeight:
    return dataclasses.replace(weight, scales=weight.scales * 0.06)


def _compressed(**weights: Any) -> dict[str, Any]:
    form = "int-quantized" if weights["type"] == "int" else "float-quantized"
    weights = {"num_bits": 8, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# Settings, maker of a matrix by rows, columns and seed, and the type that the CPU multiplies with.
CASES: dict[str, tuple[dict[str, Any], Maker, GGMLType]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda rows, cols, seed: random_awq(rows, cols, 32, seed),
        GGMLType.Q4_1,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        lambda rows, cols, seed: random_gptq(rows, cols, 32, seed=seed),
        GGMLType.Q4_1,
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda rows, cols, seed: dataclasses.replace(
            random_gptq(rows, cols, cols, seed=seed), zero_offset=0, g_idx=None
        ),
        GGMLType.Q4_1,
    ),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda rows, cols, seed: random_gptq(rows, cols, 32, has_act_order=True, seed=seed),
        GGMLType.F16,
    ),
    "int8-row": (
        _compressed(type="int", strategy="channel"),
        lambda rows, cols, seed: _smaller(random_int8(rows, cols, cols, seed)),
        GGMLType.Q8_0,
    ),
    "int8-group": (
        _compressed(type="int", strategy="group", group_size=32),
        lambda rows, cols, seed: _smaller(random_int8(rows, cols, 32, seed)),
        GGMLType.Q8_0,
    ),
    "fp8-row": (
        _compressed(type="float", strategy="channel"),
        lambda rows, cols, seed: _smaller(random_fp8(rows, cols, has_row_scales=True, seed=seed)),
        GGMLType.BF16,
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda rows, cols, seed: _smaller(random_fp8(rows, cols, seed=seed)),
        GGMLType.BF16,
    ),
    "fp8-tiles": (
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
        lambda rows, cols, seed: _smaller(random_fp8(rows, cols, block=(48, 32), seed=seed)),
        GGMLType.BF16,
    ),
}


def _quantize(folder: Path, target: Path, name: str) -> tuple[Path, Path]:
    """The checkpoint with packed matrices in its layers, and the same with their values; those of
    fp8 rounded to bfloat16."""
    settings, make, kind = CASES[name]
    packed = load_file(folder / "model.safetensors")
    values = dict(packed)
    for seed, full in enumerate(sorted(packed)):
        if "_proj.weight" not in full:
            continue
        weight = make(*packed.pop(full).shape, seed)
        values[full] = weight.dequantize()
        if kind is GGMLType.BF16:
            values[full] = values[full].to(torch.bfloat16).float()
        module = full.removesuffix(".weight")
        packed |= {f"{module}.{part}": data for part, data in _tensors_of(weight).items()}
    for path, tensors in ((target / "packed", packed), (target / "values", values)):
        shutil.copytree(folder, path)
        contiguous = {key: value.contiguous() for key, value in tensors.items()}
        save_file(contiguous, path / "model.safetensors")
    _set_quantization(target / "packed", settings)
    return target / "packed", target / "values"


def _set_quantization(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return config


def _weights(folder: Path) -> CheckpointWeights:
    config = json.loads((folder / "config.json").read_text())
    return CheckpointWeights.from_safetensors(
        SafetensorsFiles.open(folder), read_hf_config(config), "auto", read_quantization(config)
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_matrices(
    name: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    packed, values = _quantize(checkpoint("llama")[1], tmp_path, name)

    ours = compute_logits(packed, PROMPT)

    expected = compute_logits(values, PROMPT)
    # Scales and minima are rounded to float16; some CPUs round what meets bfloat16 to bfloat16.
    limit = (0.1 if CASES[name][2] is GGMLType.BF16 else 0.03) * float(expected.std())
    torch.testing.assert_close(ours, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("name", CASES)
def test_matrices_have_the_type_that_the_memory_was_planned_for(
    name: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    packed, _ = _quantize(checkpoint("llama")[1], tmp_path, name)
    weights = _weights(packed)
    weights.keep_in_memory()

    matrix = weights.matrix("down", 64, 96, layer=1)

    assert isinstance(matrix, Weight)
    assert matrix.type is CASES[name][2]
    weights.leave_packed()
    assert not isinstance(weights.matrix("down", 64, 96, layer=1), Weight)


def test_symmetric_codes_are_exact_on_the_cpu() -> None:
    weight = random_gptq(16, 64, 32)
    zeros = pack_nibbles(torch.full((2, 16), 7).numpy(), axis=1)
    weight = dataclasses.replace(weight, qzeros=zeros)

    repacked = as_ggml(weight)

    assert repacked.type is GGMLType.Q4_0
    assert torch.equal(dequantize(repacked), weight.dequantize())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("drop qzeros", "qzeros is missing; the model needs it with shape (2, 8)"),
        ("transpose qweight", "has shape (8, 512)"),
        ("shuffle g_idx", "is not in order, though desc_act is not set"),
        ("repeat g_idx", "does not make groups of 32 columns"),
    ],
)
def test_damaged_matrices_are_refused_by_name(
    change: str, words: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    packed, _ = _quantize(checkpoint("llama")[1], tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    module = "model.layers.0.self_attn.q_proj."
    verb, part = change.split()
    stored = tensors.pop(module + part)
    if verb == "transpose":
        tensors[module + part] = stored.T.contiguous()
    elif part == "g_idx":
        tensors[module + part] = stored.flip(0) if verb == "shuffle" else torch.zeros_like(stored)
    save_file(tensors, packed / "model.safetensors")

    with pytest.raises(StartupError) as caught:
        _weights(packed).matrix("q", 64, 64, layer=0)

    assert words in str(caught.value)
    assert module.removesuffix(".") in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "the method 'bitsandbytes' is not supported"),
        ({"bits": 4}, "the method None is not supported"),
        ([4], "quantization_config is not an object"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "fp8 with blocks of [0, 1]"),
        (
            _compressed(type="int", strategy="channel") | {"format": "pack-quantized"},
            "compressed-tensors with format 'pack-quantized'",
        ),
        (_compressed(type="int", symmetric=False), "compressed-tensors with symmetric False"),
        ({"quant_method": "compressed-tensors"}, "supported with one of config_groups"),
        ({"quant_method": ["awq"]}, "the method ['awq'] is not supported"),
        (
            _compressed(type="int", strategy="channel")
            | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            "compressed-tensors with transform_config",
        ),
        (
            _compressed(type="int", strategy="channel")
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config with format 'sparse-24-bitmask'",
        ),
    ],
)
def test_unsupported_methods_are_refused_by_name(settings: Any, words: str) -> None:
    with pytest.raises(StartupError) as caught:
        read_quantization({"quantization_config": settings})

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_without_quantisation_have_no_method() -> None:
    assert read_quantization({}) is None
