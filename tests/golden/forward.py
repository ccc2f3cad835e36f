"""One forward pass of our decoder over one prompt, without scheduler and sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmserve.config import CacheConfig, ModelConfig
from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.files.model import open_model
from llmserve.kernels import CPUKernels
from llmserve.models import Decoder, DecoderConfig, build_decoder, read_model
from llmserve.runner.batch import SequenceRows
from llmserve.runner.kv_tensors import KVTensors
from llmserve.runner.memory import make_kv_spec

BLOCK_SIZE = 16


def load(
    path: Path, max_model_len: int | None = None, **settings: Any
) -> tuple[DecoderConfig, Decoder, int]:
    config = ModelConfig(model=str(path), **settings)
    files = open_model(config, lambda line: None)
    model, weights = read_model(
        files, dtype=config.dtype, load_format=config.load_format, seed=config.seed
    )
    length = max_model_len or model.max_context
    return model, build_decoder(model, weights, length, CPUKernels()), length


def compute_logits(
    path: Path,
    token_ids: list[int],
    max_model_len: int | None = None,
    **settings: Any,
) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size], in one forward pass with a float32 KV cache."""
    model, decoder, length = load(path, max_model_len, **settings)
    return forward(model, decoder, length, token_ids)


def forward(
    model: DecoderConfig,
    decoder: Decoder,
    max_model_len: int,
    token_ids: list[int],
    kv: KVTensors | None = None,
) -> torch.Tensor:
    """kv: of an earlier prompt that was as long, whose blocks are written again."""
    spec = make_kv_spec(model, CacheConfig(block_size=BLOCK_SIZE), "float32", max_model_len)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    tables = tuple(
        list(range(1 + group * num_blocks, 1 + (group + 1) * num_blocks))
        for group in range(len(spec.groups))
    )
    if kv is None:
        kv = KVTensors(spec, 1 + num_blocks * len(spec.groups), CPUKernels())
    rows = SequenceRows(1, max_model_len, BLOCK_SIZE, len(spec.groups))
    rows.add(NewSequence("a", token_ids, len(token_ids), SamplingParams(), tables))
    batch = rows.build(StepPlan(["a"], [0], [len(token_ids)], [False]))
    with torch.inference_mode():
        return decoder.compute_logits(decoder.forward(batch.forward, kv.layers))
