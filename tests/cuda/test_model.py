"""Whole models through the CUDA kernels: tokens, log-probabilities, graphs, steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.errors import StepOutOfMemoryError
from tests.cuda.checkpoints import VOCAB_SIZE, Checkpoint, make_small_checkpoint
from tests.cuda.cuda_engine import CUDAEngine, ReplayingRecorder
from tests.golden import reference
from tests.golden.tiny_engine import TinyEngine, make_prompts
from tests.make_gguf import save_gguf

NUM_TOKENS = 4
# Shorter and longer than a block, a chunk and a window.
PROMPTS = make_prompts([3, 18], VOCAB_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Name of an architecture -> (model, folder)."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = make_small_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3", "gemma3", "olmo2"])
def test_tokens_equal_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint], cuda_module: Any, device: torch.device
) -> None:
    """Prompts in chunks and decodes, through graphs; a prompt of which the cache holds a part."""
    model, folder = checkpoint(name)
    recorder = ReplayingRecorder(device)
    engine = CUDAEngine(folder, cuda_module, device, recorder=recorder, max_num_tokens=16)

    outputs = engine.generate(PROMPTS, NUM_TOKENS)
    again = engine.generate(PROMPTS[-1:], 2)

    expected = reference.greedy(model, PROMPTS, NUM_TOKENS)
    assert [output.token_ids for output in outputs] == expected
    assert again[0].token_ids == expected[-1][:2]
    assert recorder.num_replays > 0
    assert recorder.num_piecewise_replays > 0


SAMPLINGS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 7},
    "edited": {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "logit_bias": ((5, 4.0), (9, 4.5)),
        "bad_words_token_ids": ((9,),),
        "num_logprobs": 2,
    },
    "scored": {"num_logprobs": 3, "num_prompt_logprobs": 1},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_equals_that_of_the_cpu(
    name: str, checkpoint: Callable[[str], Checkpoint], cuda_module: Any, device: torch.device
) -> None:
    _, folder = checkpoint("qwen3")
    sampling = SAMPLINGS[name]
    cpu = TinyEngine(folder, cache={"kv_cache_dtype": "float32"}, max_model_len=64)
    engine = CUDAEngine(folder, cuda_module, device)

    outputs = engine.generate(PROMPTS, NUM_TOKENS, **sampling)

    for output, expected in zip(
        outputs, cpu.generate(PROMPTS, NUM_TOKENS, **sampling), strict=True
    ):
        assert output.token_ids == expected.token_ids
        scores = zip(
            [*output.logprobs, *output.prompt_logprobs],
            [*expected.logprobs, *expected.prompt_logprobs],
            strict=True,
        )
        for score, wanted in scores:
            if score is None or wanted is None:
                assert score is wanted
                continue
            assert (score.token_id, score.rank, score.top_ids) == (
                wanted.token_id,
                wanted.rank,
                wanted.top_ids,
            )
            assert score.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float16", "fp8")])
def test_narrow_types_give_tokens(
    dtype: str,
    kv_dtype: str,
    checkpoint: Callable[[str], Checkpoint],
    cuda_module: Any,
    device: torch.device,
) -> None:
    _, folder = checkpoint("llama-tied-biased")
    engine = CUDAEngine(folder, cuda_module, device, dtype=dtype, kv_dtype=kv_dtype, max_num_seqs=2)

    outputs = engine.generate(PROMPTS, 3, num_logprobs=1)

    assert [len(output.token_ids) for output in outputs] == [3, 3]
    assert all(score.logprob <= 0.0 for output in outputs for score in output.logprobs)


def test_quantised_weights_give_the_tokens_of_the_cpu(
    tmp_path: Path, checkpoint: Callable[[str], Checkpoint], cuda_module: Any, device: torch.device
) -> None:
    model, _ = checkpoint("qwen3")
    path = tmp_path / "m.gguf"
    save_gguf(model, path, "qwen3", quantization=GGMLQuantizationType.Q8_0)
    cpu = TinyEngine(path, cache={"kv_cache_dtype": "float32"}, max_model_len=64)
    engine = CUDAEngine(path, cuda_module, device)

    (output,) = engine.generate(PROMPTS[:1], 3)

    assert output.token_ids == cpu.generate(PROMPTS[:1], 3)[0].token_ids


def test_probe_computes_and_leaves_no_trace(
    checkpoint: Callable[[str], Checkpoint], cuda_module: Any, device: torch.device
) -> None:
    model, folder = checkpoint("qwen3")
    engine = CUDAEngine(folder, cuda_module, device)

    engine.runner.probe()
    (output,) = engine.generate(PROMPTS[:1], 2)
    engine.runner.probe()

    assert output.token_ids == reference.greedy(model, PROMPTS[:1], 2)[0]


def test_lack_of_memory_has_an_error_of_its_own(
    checkpoint: Callable[[str], Checkpoint],
    cuda_module: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, folder = checkpoint("qwen3")
    engine = CUDAEngine(folder, cuda_module, device)

    def raise_out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine.runner._kernels, "paged_attention", raise_out_of_memory)
    sequence = NewSequence("a", [3, 4], 2, SamplingParams(), ([1],))

    with pytest.raises(StepOutOfMemoryError, match="no memory"):
        engine.runner.launch(StepPlan(["a"], [0], [2], [True], new=[sequence]))
