"""Scales of K and V from a checkpoint, in a KV cache of fp8."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmserve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from llmserve.files.model import open_model
from llmserve.kernels.cuda.kernels import CUDAKernels
from llmserve.models import read_model
from llmserve.runner.cuda_load import load_cuda_runner
from tests.cuda.cuda_engine import CUDAEngine, ReplayingRecorder
from tests.cuda.test_load import FakeMemory
from tests.golden.tiny_engine import Output, make_prompts
from tests.make_checkpoints import ARCHITECTURES, make_model, save_checkpoint

VOCAB_SIZE = 96
HEAD_DIM = 16
QUERIES_PER_KV = 2
(PROMPT,) = make_prompts([34], VOCAB_SIZE)  # three blocks
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
}
# The largest of e4m3 is 448; values of about 3 are stored as 3 * 64.
STEPS = 64.0


def save_stretched(folder: Path, k: Sequence[float], v: Sequence[float]) -> dict[str, torch.Tensor]:
    """A checkpoint whose K and V are so many times as large, by head, and which computes the same
    all the same: queries and the output matrix make up for it. Returns its tensors."""
    kind = ARCHITECTURES["llama"]
    save_checkpoint(make_model(dataclasses.replace(kind, settings=kind.settings | SIZES)), folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn."
        k_rows = torch.tensor(k).repeat_interleave(HEAD_DIM)
        v_rows = torch.tensor(v).repeat_interleave(HEAD_DIM)
        k_heads = torch.tensor(k).repeat_interleave(HEAD_DIM * QUERIES_PER_KV)
        v_heads = torch.tensor(v).repeat_interleave(HEAD_DIM * QUERIES_PER_KV)
        tensors[attention + "k_proj.weight"] *= k_rows[:, None]
        tensors[attention + "v_proj.weight"] *= v_rows[:, None]
        tensors[attention + "q_proj.weight"] /= k_heads[:, None]
        tensors[attention + "o_proj.weight"] /= v_heads
    return tensors


def add_scales(
    folder: Path, tensors: dict[str, torch.Tensor], names: tuple[str, str], scales: Any
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for layer in range(2):
        for name, values in zip(names, scales, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = values.clone()
    save_file(tensors, folder / "model.safetensors")


def save_scaled(folder: Path, *, is_per_head: bool) -> None:
    if is_per_head:
        k, v = (5000.0, 40.0), (30.0, 8000.0)
        names = ("k_scale", "v_scale")
        scales = [torch.tensor(factors).view(2, 1, 1) / STEPS for factors in (k, v)]
    else:
        k, v = (5000.0, 5000.0), (8000.0, 8000.0)
        names = ("k_proj.k_scale", "v_proj.v_scale")
        scales = [torch.tensor(factors[0] / STEPS) for factors in (k, v)]
    add_scales(folder, save_stretched(folder, k, v), names, scales)


@pytest.mark.parametrize("is_per_head", [False, True])
def test_large_values_keep_their_place_through_the_scales_of_the_checkpoint(
    is_per_head: bool, tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    save_scaled(tmp_path, is_per_head=is_per_head)

    def run(kv_dtype: str) -> Output:
        engine = CUDAEngine(
            tmp_path,
            cuda_module,
            device,
            kv_dtype=kv_dtype,
            recorder=ReplayingRecorder(device),
            max_num_tokens=16,
        )
        return engine.generate([PROMPT], 2, num_prompt_logprobs=0, num_logprobs=VOCAB_SIZE)[0]

    ours, exact = run("fp8"), run("float32")

    # Without scales, or with those of other heads, they differ by 1.5 and more.
    torch.testing.assert_close(of_prompt(ours), of_prompt(exact), rtol=0, atol=0.15)
    assert ours.token_ids[0] == exact.token_ids[0]
    torch.testing.assert_close(of_decode(ours), of_decode(exact), rtol=0, atol=0.15)


def of_prompt(output: Output) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens behind the first."""
    return torch.tensor([score.logprob for score in output.prompt_logprobs if score is not None])


def of_decode(output: Output) -> torch.Tensor:
    """Log-probabilities of all tokens behind the first token of the output, by id."""
    score = output.logprobs[1]
    ranked = sorted(zip(score.top_ids, score.top_logprobs, strict=True))
    return torch.tensor([logprob for _, logprob in ranked])


@pytest.mark.parametrize(("kv_cache_dtype", "has_scales"), [("fp8", True), ("auto", False)])
def test_loaded_runner_has_scales_for_a_cache_of_fp8_only(
    kv_cache_dtype: str,
    has_scales: bool,
    tmp_path: Path,
    cuda_module: Any,
    device: torch.device,
) -> None:
    save_scaled(tmp_path, is_per_head=True)
    config = ServerConfig(
        model=ModelConfig(model=str(tmp_path)),
        cache=CacheConfig(kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8),
    )
    model, weights = read_model(
        open_model(config.model, lambda line: None), dtype="auto", load_format="auto", seed=0
    )
    kernels = CUDAKernels(cuda_module, device, torch.float32)

    runner, _ = load_cuda_runner(model, weights, config, kernels, FakeMemory(64 << 20), None)

    for layer in runner._kv.layers:
        assert (layer.scales is not None) == has_scales
        if layer.scales is not None:
            assert (layer.scales.k * STEPS).tolist() == [5000.0, 40.0]
            assert (layer.scales.v * STEPS).tolist() == [30.0, 8000.0]
