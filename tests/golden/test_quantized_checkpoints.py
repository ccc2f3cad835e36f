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
from tests.golden.tiny_engine import TinyEngine, make_prompts
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


def _tensors_of(weight: PackedWeight, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(weight, AWQWeight):
        return {"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales}
    if isinstance(weight, GPTQWeight):
        tensors = {"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales}
        # Some tools add a bias of zeros to every matrix.
        tensors["bias"] = torch.zeros(weight.num_rows)
        return tensors if weight.g_idx is None else tensors | {"g_idx": weight.g_idx}
    if isinstance(weight, FP8Weight) and weight.block is not None:
        suffix = "_inv" if settings["quant_method"] == "fp8" else ""
        return {"weight": weight.data, f"weight_scale{suffix}": weight.scales}
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
    "fp8-modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda rows, cols, seed: _smaller(random_fp8(rows, cols, seed=seed)),
        GGMLType.BF16,
    ),
    "fp8-blocks": (
        _compressed(type="float", strategy="block", block_structure=[48, 32]),
        lambda rows, cols, seed: _smaller(random_fp8(rows, cols, block=(48, 32), seed=seed)),
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
        parts = _tensors_of(weight, settings)
        packed |= {f"{module}.{part}": data for part, data in parts.items()}
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


def test_scales_of_the_kv_cache_mean_nothing_to_a_cache_of_floats(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    _, folder = checkpoint("llama")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("k_scale", "v_proj.v_scale", "q_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.full((7, 1), -1.0)
    save_file(tensors, tmp_path / "model.safetensors")
    scheme = {"num_bits": 4, "type": "int"}
    _set_quantization(tmp_path, {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})

    assert torch.equal(compute_logits(tmp_path, PROMPT), compute_logits(folder, PROMPT))


def test_symmetric_codes_are_exact_on_the_cpu() -> None:
    weight = random_gptq(16, 64, 32)
    zeros = pack_nibbles(torch.full((2, 16), 7).numpy(), axis=1)
    weight = dataclasses.replace(weight, qzeros=zeros)

    repacked = as_ggml(weight)

    assert repacked.type is GGMLType.Q4_0
    assert torch.equal(dequantize(repacked), weight.dequantize())


# Case, change of a tensor's part, changes of the settings, and what is said of the module's part.
# The matrix has 64 rows and 64 columns, in two groups or blocks of 32.
DAMAGES: list[tuple[str, str, dict[str, Any], str]] = [
    ("awq", "drop qweight", {}, "qweight is missing; the model needs it with shape (64, 8)"),
    ("awq", "drop qzeros", {}, "qzeros is missing; the model needs it with shape (2, 8)"),
    ("awq", "drop scales", {}, "scales is missing; the model needs it with shape (2, 64)"),
    (
        "awq",
        "halve scales",
        {},
        "scales is F16 (1, 64); the model needs F32 or F16 or BF16 (2, 64)",
    ),
    (
        "awq",
        "halve qzeros",
        {},
        "qzeros is I32 (1, 8); the model needs I32 (2, 8), as config.json has",
    ),
    ("awq", "float qweight", {}, "qweight is F32 (64, 8); the model needs I32 (64, 8)"),
    ("awq", "keep all", {"group_size": 16}, "(4, 64), as config.json has group_size 16"),
    ("awq", "keep all", {"group_size": -1}, "(1, 64), as config.json has group_size -1"),
    (
        "awq",
        "keep all",
        {"group_size": 48},
        "group_size is 48, which does not divide the 64 columns",
    ),
    ("gptq", "drop qweight", {}, "qweight is missing; the model needs it with shape (8, 64)"),
    ("gptq", "drop qzeros", {}, "qzeros is missing; the model needs it with shape (2, 8)"),
    ("gptq", "transpose qweight", {}, "qweight is I32 (64, 8); the model needs I32 (8, 64)"),
    ("gptq", "transpose scales", {}, "scales is F16 (64, 2); the model needs"),
    ("gptq", "shuffle g_idx", {}, "g_idx is not in order, though desc_act is not set"),
    ("gptq", "repeat g_idx", {}, "g_idx does not make groups of 32 columns"),
    ("gptq", "drop g_idx", {"desc_act": True}, "g_idx is missing; the model needs it"),
    ("gptq-v2", "drop scales", {}, "scales is missing; the model needs it with shape (1, 64)"),
    ("int8-row", "drop weight", {}, "weight is missing; the model needs it with shape (64, 64)"),
    ("int8-row", "float weight", {}, "weight is F32 (64, 64); the model needs I8 (64, 64)"),
    ("int8-row", "drop weight_scale", {}, "weight_scale is missing; the model needs it with shape"),
    ("int8-row", "halve weight_scale", {}, "weight_scale is F32 (32, 1); the model needs F32"),
    ("int8-group", "halve weight_scale", {}, "BF16 (64, 2), as config.json has group_size 32"),
    ("fp8-row", "halve weight_scale", {}, "BF16 (64, 1), as config.json has strategy channel"),
    ("fp8-tensor", "drop weight", {}, "weight is missing; the model needs it with shape (64, 64)"),
    (
        "fp8-tensor",
        "drop weight_scale",
        {},
        "weight_scale is missing; the model needs it with shape",
    ),
    ("fp8-tiles", "drop weight_scale_inv", {}, "weight_scale_inv is missing; the model needs it"),
    (
        "fp8-tiles",
        "halve weight_scale_inv",
        {},
        "BF16 (2, 2), as config.json has blocks of 48 x 32",
    ),
]


def _damage(tensors: dict[str, torch.Tensor], full: str, verb: str) -> None:
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transpose": lambda stored: stored.T.contiguous(),
        "halve": lambda stored: stored[: len(stored) // 2].clone(),
        "float": lambda stored: stored.float(),
        "shuffle": lambda stored: stored.flip(0),
        "repeat": torch.zeros_like,
    }
    stored = tensors.pop(full)
    if verb != "drop":
        tensors[full] = changes[verb](stored)


@pytest.mark.parametrize(("name", "change", "settings", "words"), DAMAGES)
def test_damaged_matrices_are_refused_by_the_name_of_what_they_lack(
    name: str,
    change: str,
    settings: dict[str, Any],
    words: str,
    checkpoint: Callable[[str], Checkpoint],
    tmp_path: Path,
) -> None:
    packed, _ = _quantize(checkpoint("llama")[1], tmp_path, name)
    _set_quantization(packed, CASES[name][0] | settings)
    module = "model.layers.0.self_attn.q_proj"
    verb, part = change.split()
    if verb != "keep":
        tensors = load_file(packed / "model.safetensors")
        _damage(tensors, f"{module}.{part}", verb)
        save_file(tensors, packed / "model.safetensors")

    with pytest.raises(StartupError) as caught:
        TinyEngine(packed)

    sentence = str(caught.value)
    assert words in sentence
    assert module in sentence
    assert verb == "keep" or f"tensor {module}.{part} " in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "the method 'bitsandbytes' is not supported"),
        ({"bits": 4}, "the method None is not supported"),
        ([4], "quantization_config is not an object"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3 is not supported"),
        (
            {"quant_method": "gptq", "desc_act": "yes"},
            "desc_act is 'yes'; it must be true or false",
        ),
        ({"quant_method": "gptq", "desc_act": 1}, "desc_act is 1; it must be true or false"),
        (
            {"quant_method": "awq", "group_size": "128"},
            "group_size is '128'; it must be an integer",
        ),
        (
            {"quant_method": "awq", "q_group_size": 0},
            "q_group_size is 0; it must be above 0, or -1",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt with quant_algo 'NVFP4'"),
        (_compressed(type="int", strategy="group"), "with strategy 'group' has no group_size"),
        (_compressed(type="int", actorder="group"), "compressed-tensors with actorder 'group'"),
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


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
    ],
)
def test_models_whose_matrices_are_not_quantised_have_no_method(settings: Any) -> None:
    assert read_quantization({"quantization_config": settings}) is None
