"""The demo model (Gemma 3 270M, Q4_K_M) against transformers with the same weights dequantised.

Activations are rounded to 16 bits per group of 32 here and not there, so logits agree closely, not
exactly. What is exact is the independence from the batch, the threads and the prefix cache.
"""

from __future__ import annotations

import asyncio
import decimal
import email
import inspect
import logging
import optparse
import random
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from llmserve import kernels
from llmserve.config import ModelConfig
from llmserve.core import TokenLogprobs
from llmserve.files.gguf import GGUFFile
from llmserve.files.model import ModelFiles, open_model
from llmserve.kernels import Weight
from llmserve.models import Decoder, DecoderConfig, build_decoder, read_model
from llmserve.models.weights import CheckpointWeights
from llmserve.tokenizer import load_tokenizer
from tests.golden.forward import forward, load
from tests.golden.tiny_engine import Output, TinyEngine, make_prompts

MAX_MODEL_LEN = 2048
NUM_WORDS = 2000
NUM_PROMPTS = 20
PROMPT_LEN = 24
BOS = 2
# Positions whose logits are held at once: a row of them has a megabyte.
SLICE = 256

_MODULES = (asyncio, decimal, email, inspect, logging, optparse, random, statistics, subprocess)
_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_model(ModelConfig(), lambda line: None)


@pytest.fixture(scope="module")
def engine() -> TinyEngine:
    return TinyEngine(None, max_model_len=MAX_MODEL_LEN, scheduler={"max_num_seqs": 40})


@pytest.fixture(scope="module")
def text_ids(files: ModelFiles) -> list[int]:
    """English prose: what the standard library says of itself."""
    parts = []
    for module in _MODULES:
        parts.append(inspect.getdoc(module) or "")
        for name, member in sorted(vars(module).items()):
            if not name.startswith("_") and inspect.isclass(member):
                parts.append(inspect.getdoc(member) or "")
    words = re.split(r"\s+", " ".join(parts))
    assert len(words) >= NUM_WORDS
    tokenizer = load_tokenizer(files, None)
    return tokenizer.encode(" ".join(words[:NUM_WORDS]), add_special_tokens=False)


@dataclass
class Reference:
    """transformers' model, computed in float32 on all positions of a text, slice by slice."""

    model: Gemma3ForCausalLM

    def logits(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        """float32 [up to SLICE, vocab_size] for one run of positions after the other."""
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([token_ids])).last_hidden_state[0]
            for rows in hidden.split(SLICE):
                yield self.model.lm_head(rows)


@pytest.fixture(scope="module")
def transformers_model(files: ModelFiles) -> Reference:
    assert files.gguf is not None
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32_768,
        query_pre_attn_scalar=256,
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    parameters = _parameters(files.gguf)
    parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    model.load_state_dict(parameters, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    return Reference(model.eval())


def _parameters(file: GGUFFile) -> dict[str, torch.Tensor]:
    """transformers' names; norm weights without the 1 that GGUF files add to them."""
    parameters = {}
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType(int(tensor.ggml_type))
        raw = np.array(file.data(name)).reshape(tensor.shape[0], -1)
        values = torch.from_numpy(gguf.dequantize(raw, kind)).reshape(tensor.shape)
        base = name.removesuffix(".weight")
        if base == "token_embd":
            parameters["model.embed_tokens.weight"] = values
        elif base == "output_norm":
            parameters["model.norm.weight"] = values - 1
        else:
            _, layer, part = base.split(".")
            target = f"model.layers.{layer}.{_MATRICES.get(part) or _NORMS[part]}.weight"
            parameters[target] = values if part in _MATRICES else values - 1
    return parameters


def _logprob(entry: TokenLogprobs | None) -> float:
    assert entry is not None
    return entry.logprob


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    stride = len(text_ids) // NUM_PROMPTS
    begins = range(0, NUM_PROMPTS * stride, stride)
    return [[BOS, *text_ids[begin : begin + PROMPT_LEN - 1]] for begin in begins]


@pytest.fixture(scope="module")
def prompt_logits(transformers_model: Reference, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits, float32 [PROMPT_LEN, vocab_size] per prompt."""
    return [next(transformers_model.logits(prompt)) for prompt in prompts]


class DequantizedWeights(CheckpointWeights):
    """The demo's matrices as float32, so that no activation is rounded beside them."""

    def matrix(
        self, parameter: str, num_rows: int, num_cols: int, layer: int | None = None
    ) -> Weight:
        stored = super().matrix(parameter, num_rows, num_cols, layer)
        return Weight.from_tensor(kernels.dequantize(stored))


def _similarities(
    config: DecoderConfig,
    decoder: Decoder,
    prompts: list[list[int]],
    prompt_logits: list[torch.Tensor],
) -> torch.Tensor:
    """Cosine of our logits and transformers' at each position of each prompt."""
    similarities = [
        torch.cosine_similarity(forward(config, decoder, MAX_MODEL_LEN, prompt), theirs, dim=-1)
        for prompt, theirs in zip(prompts, prompt_logits, strict=True)
    ]
    joined = torch.cat(similarities)
    assert joined.shape == (NUM_PROMPTS * PROMPT_LEN,)
    return joined


def test_dequantised_model_gives_transformers_logits_at_every_position(
    files: ModelFiles, prompts: list[list[int]], prompt_logits: list[torch.Tensor]
) -> None:
    assert files.gguf is not None
    config, _ = read_model(files, dtype="auto", load_format="auto", seed=0)
    weights = DequantizedWeights.from_gguf(files.gguf, config, "auto")
    decoder = build_decoder(config, weights, MAX_MODEL_LEN, kernels.CPUKernels())

    similarities = _similarities(config, decoder, prompts, prompt_logits)

    assert similarities.min() > 0.9999


def test_quantised_model_stays_close_to_transformers(
    files: ModelFiles, prompts: list[list[int]], prompt_logits: list[torch.Tensor]
) -> None:
    config, decoder, _ = load(files.path)

    similarities = _similarities(config, decoder, prompts, prompt_logits)

    assert similarities.min() > 0.999


def test_perplexity_of_real_text_is_within_one_percent(
    engine: TinyEngine, transformers_model: Reference, text_ids: list[int]
) -> None:
    pieces = [[BOS, *text_ids[begin : begin + 1000]] for begin in range(0, len(text_ids), 1000)]
    ours: list[float] = []
    theirs: list[float] = []

    for piece in pieces:
        (output,) = engine.generate([piece], 1, num_prompt_logprobs=0)
        ours += [_logprob(entry) for entry in output.prompt_logprobs[1:]]
        targets = torch.tensor(piece[1:])
        for index, logits in enumerate(transformers_model.logits(piece)):
            wanted = targets[index * SLICE : (index + 1) * SLICE]
            rows = logits[: len(wanted)].log_softmax(-1)
            theirs += rows.gather(1, wanted[:, None])[:, 0].tolist()

    assert len(ours) == len(theirs) == len(text_ids)
    perplexity, expected = np.exp(-np.mean(ours)), np.exp(-np.mean(theirs))
    assert perplexity == pytest.approx(expected, rel=0.01)


def test_request_alone_among_others_and_on_one_thread_is_bit_equal(engine: TinyEngine) -> None:
    (prompt,) = make_prompts([150], 262_144, seed=5)
    others = make_prompts([10 + index for index in range(32)], 262_144, seed=6)
    before = kernels.get_num_threads()

    def run(prompts: list[list[int]]) -> Output:
        return engine.generate(prompts, 4, num_logprobs=5)[0]

    cold = run([prompt])
    warm = run([prompt])
    crowded = run([prompt, *others])
    engine.scheduler.reset_prefix_cache()
    try:
        kernels.set_num_threads(1)
        single = run([prompt])
    finally:
        kernels.set_num_threads(before)

    assert cold.num_cached_tokens == single.num_cached_tokens == 0
    assert warm.num_cached_tokens > 0
    for other in (warm, crowded, single):
        assert other.token_ids == cold.token_ids
        assert other.logprobs == cold.logprobs
