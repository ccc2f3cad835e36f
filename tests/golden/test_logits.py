"""Logits and hidden states against transformers: layers, rope scalings, formats, storage types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from llmserve.config import CacheConfig
from llmserve.kernels import HAS_EXT, CPUKernels
from llmserve.layers import DecoderLayer
from llmserve.runner.kv_tensors import KVTensors
from llmserve.runner.memory import make_kv_spec
from tests.golden import reference
from tests.golden.conftest import Checkpoint
from tests.golden.forward import BLOCK_SIZE, compute_logits, forward, load
from tests.golden.tiny_engine import make_prompts
from tests.make_checkpoints import (
    ARCHITECTURES,
    ROPE_SCALINGS,
    VOCAB_SIZE,
    make_model,
    save_checkpoint,
)
from tests.make_gguf import load_parameters, save_gguf

if HAS_EXT:
    from llmserve import _cpu_kernels

# Both sides compute in float32, in different orders; logits have a standard deviation of 1.
FLOAT32_ATOL = 5e-5

(PROMPT,) = make_prompts([200], VOCAB_SIZE, seed=1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "olmo2", "granite", "smollm3"])
def test_hidden_states_of_each_layer_equal_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = checkpoint(name)
    config, decoder, length = load(folder)
    states = []

    class Recorder:
        def __init__(self, layer: DecoderLayer) -> None:
            self.layer = layer

        def __call__(self, x: Any, residual: Any, inputs: Any, cache: Any) -> torch.Tensor:
            x = self.layer(x, residual, inputs, cache)
            states.append(residual.clone())
            return x

    decoder.layers.layers = [Recorder(layer) for layer in decoder.layers.layers]  # type: ignore[misc]
    monkeypatch.setattr(decoder.layers, "_compiled", None)
    forward(config, decoder, length, PROMPT)

    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    # transformers' last one is after the final norm; the others are before the next layer.
    assert len(states) == len(expected) - 1
    for ours, theirs in zip(states[:-1], expected[1:-1], strict=True):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_EXT, reason="there are no compiled layers")
@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_layers_give_the_bits_of_the_layers_in_python(
    name: str,
    num_tokens: int,
    checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, folder = checkpoint(name)
    config, decoder, length = load(folder)
    compiled = forward(config, decoder, length, PROMPT[:num_tokens])

    monkeypatch.setattr(decoder.layers, "_compiled", None)

    assert torch.equal(forward(config, decoder, length, PROMPT[:num_tokens]), compiled)


@pytest.mark.parametrize("is_shared", [True, False], ids=["same caches", "other caches"])
def test_compiled_layers_notice_another_step_of_the_same_shape(
    is_shared: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Their arguments are checked once for the same objects, and these share all scratch memory."""
    _, folder = checkpoint("gemma3")
    config, decoder, length = load(folder)
    prompts = [PROMPT[:20], PROMPT[20:40]]
    expected = [forward(*load(folder), prompt) for prompt in prompts]
    spec = make_kv_spec(config, CacheConfig(block_size=BLOCK_SIZE), "float32", length)
    kv = KVTensors(spec, 1 + 20 * len(spec.groups), CPUKernels()) if is_shared else None

    for index in (0, 1, 1, 0):
        result = forward(config, decoder, length, prompts[index], kv)
        assert torch.equal(result, expected[index])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_a_long_prompt_equal_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint(name)

    logits = compute_logits(folder, PROMPT)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_rope_scaling_past_the_original_context_equals_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint(name)

    # Dynamic scaling depends on the length: ours on the longest that is served.
    logits = compute_logits(folder, PROMPT, len(PROMPT) if name == "dynamic" else None)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)


def test_longrope_keeps_its_short_factors_within_the_original_context(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model, folder = checkpoint("longrope")

    logits = compute_logits(folder, PROMPT[:60], max_model_len=64)

    torch.testing.assert_close(
        logits, reference.logits(model, PROMPT[:60]), rtol=0, atol=FLOAT32_ATOL
    )


def test_sharded_checkpoint_gives_the_logits_of_a_single_file(
    tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint("llama")
    save_checkpoint(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    assert torch.equal(compute_logits(tmp_path, PROMPT), compute_logits(folder, PROMPT))


@pytest.fixture
def without_bfloat16_products() -> Iterator[None]:
    """Computes with the best instructions that leave activations unrounded."""
    if HAS_EXT:
        sets = _cpu_kernels.available_instruction_sets()
        _cpu_kernels.set_instruction_set([name for name in sets if name != "avx512_bf16"][-1])
    yield
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(sets[-1])


@pytest.mark.usefixtures("without_bfloat16_products")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("where", ["stored", "converted at load"])
def test_narrow_weights_are_computed_in_float32(
    dtype: str, where: str, tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint("llama")
    narrow = getattr(torch, dtype)
    settings: dict[str, Any] = {"dtype": dtype}
    if where == "stored":
        folder = save_checkpoint(model, tmp_path, dtype=narrow)
        settings = {}
    rounded = _with_rounded_weights(model, narrow, vectors=where == "stored")

    logits = compute_logits(folder, PROMPT, **settings)

    torch.testing.assert_close(logits, reference.logits(rounded, PROMPT), rtol=0, atol=FLOAT32_ATOL)


def test_products_of_bfloat16_stay_close_to_float32(
    tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, _ = checkpoint("llama")
    folder = save_checkpoint(model, tmp_path, dtype=torch.bfloat16)
    rounded = _with_rounded_weights(model, torch.bfloat16, vectors=True)

    logits = compute_logits(folder, PROMPT)

    expected = reference.logits(rounded, PROMPT)
    assert torch.cosine_similarity(logits, expected, dim=1).min() > 0.999


def _with_rounded_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, vectors: bool
) -> PreTrainedModel:
    copy: PreTrainedModel = type(model)(model.config)
    rounded = {
        name: value.to(dtype).float() if vectors or value.dim() == 2 else value
        for name, value in model.state_dict().items()
    }
    copy.load_state_dict(rounded)
    return copy.eval()


def test_multimodal_checkpoint_serves_its_text_model(
    tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint("gemma3")
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    named = {f"language_model.{name}": value for name, value in tensors.items()}
    named["vision_tower.patch.weight"] = torch.ones(4, 4)
    save_file(named, tmp_path / "model.safetensors")

    logits = compute_logits(tmp_path, PROMPT)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)


# Of these the name of the checkpoint is llama.cpp's name of the architecture.
GGUF_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
)


def _gguf_model(name: str) -> PreTrainedModel:
    """llama.cpp derives Gemma's attention scale from the head size and has no final cap in 3."""
    model = make_model(ARCHITECTURES[name])
    if name == "gemma2":
        model.config.query_pre_attn_scalar = model.config.head_dim
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    if name == "gemma3":
        model.config.final_logit_softcapping = None
    return model


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_gguf_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = _gguf_model(name)
    save_gguf(model, tmp_path / "m.gguf", name)

    logits = compute_logits(tmp_path / "m.gguf", PROMPT)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_1", "BF16"])
def test_quantised_gguf_is_close_to_its_dequantised_weights(kind: str, tmp_path: Path) -> None:
    model = _gguf_model("gemma3")
    stored = save_gguf(
        model, tmp_path / "m.gguf", "gemma3", quantization=GGMLQuantizationType[kind]
    )
    load_parameters(model, stored)

    logits = compute_logits(tmp_path / "m.gguf", PROMPT)

    # Activations are rounded to 16 bits per group of 32 beside quantised weights.
    similarity = torch.cosine_similarity(logits, reference.logits(model, PROMPT), dim=-1)
    assert similarity.min() > 0.995


def test_gguf_with_llama3_frequency_factors_equals_transformers(
    tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, _ = checkpoint("llama3")
    plain = 10_000.0 ** -(torch.arange(0, 16, 2).float() / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    save_gguf(model, tmp_path / "m.gguf", "llama", tensors={"rope_freqs.weight": factors})

    logits = compute_logits(tmp_path / "m.gguf", PROMPT)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)


@pytest.mark.parametrize("name", ["linear", "yarn"])
def test_gguf_rope_scaling_equals_transformers(
    name: str, tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, _ = checkpoint(name)
    metadata = {
        "context_length": 256,
        "rope.scaling.type": name,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    save_gguf(model, tmp_path / "m.gguf", "llama", metadata=metadata)

    logits = compute_logits(tmp_path / "m.gguf", PROMPT)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)


def test_gguf_longrope_equals_transformers(
    tmp_path: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, _ = checkpoint("longrope")
    rope = model.config.rope_parameters
    tensors = {
        f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]).numpy()
        for kind in ("short", "long")
    }
    metadata = {"rope.scaling.original_context_length": 64}
    save_gguf(model, tmp_path / "m.gguf", "phi3", metadata=metadata, tensors=tensors)

    logits = compute_logits(tmp_path / "m.gguf", PROMPT)

    torch.testing.assert_close(logits, reference.logits(model, PROMPT), rtol=0, atol=FLOAT32_ATOL)
