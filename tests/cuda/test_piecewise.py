"""Whole models whose steps with prompts go through graphs in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from llmserve.core import NewSequence, SamplingParams, StepPlan
from tests.cuda.checkpoints import VOCAB_SIZE, make_small_checkpoint
from tests.cuda.cuda_engine import CUDAEngine, ReplayingRecorder
from tests.golden import reference
from tests.golden.tiny_engine import make_prompts
from tests.make_gguf import save_gguf


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3", "olmo2"])
def test_chunks_beside_decodes_give_the_tokens_of_transformers(
    name: str, tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    """Steps of 16, 16, 16 and 5 tokens, of which the first and the last wait for their graph."""
    model, folder = make_small_checkpoint(name, tmp_path)
    recorder = ReplayingRecorder(device)
    engine = CUDAEngine(folder, cuda_module, device, recorder=recorder, max_num_tokens=16)
    prompts = make_prompts([5, 30, 14, 5, 30, 14], VOCAB_SIZE)

    first = engine.generate(prompts[:3], 6)
    num_replays = recorder.num_piecewise_replays
    second = engine.generate(prompts[3:], 6)

    assert [output.token_ids for output in first + second] == reference.greedy(model, prompts, 6)
    assert num_replays == 2
    assert recorder.num_piecewise_replays == 2 + 4


def test_every_token_of_a_padded_step_has_its_logprob(
    tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    """Prompts of a graph's size, one more and one less; each size for the second time."""
    _, folder = make_small_checkpoint("qwen3", tmp_path)
    sampling = {"num_logprobs": 1, "num_prompt_logprobs": 1}
    recorder = ReplayingRecorder(device)
    eager = CUDAEngine(folder, cuda_module, device, max_num_tokens=20)
    engine = CUDAEngine(folder, cuda_module, device, recorder=recorder, max_num_tokens=20)
    for prompt in make_prompts([8, 16, 20], VOCAB_SIZE):
        engine.generate([prompt], 1)
    assert recorder.num_graphs == 3

    for prompt in make_prompts([1, 7, 8, 9, 15, 16, 17, 20], VOCAB_SIZE):
        (output,) = engine.generate([prompt], 1, **sampling)
        (expected,) = eager.generate([prompt], 1, **sampling)

        assert output.token_ids == expected.token_ids
        scores = [*output.prompt_logprobs[1:], *output.logprobs]
        wanted = [*expected.prompt_logprobs[1:], *expected.logprobs]
        assert len(scores) == len(wanted) == len(prompt)
        for score, other in zip(scores, wanted, strict=True):
            assert score is not None
            assert other is not None
            assert score.top_ids == other.top_ids
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4)

    assert recorder.num_graphs == 3
    assert recorder.num_piecewise_replays == 8


def test_steps_larger_than_the_largest_graph_run_kernel_by_kernel(
    tmp_path: Path, cuda_module: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.runner.piecewise_graphs.SIZES", (8,))
    model, folder = make_small_checkpoint("qwen3", tmp_path)
    recorder = ReplayingRecorder(device)
    engine = CUDAEngine(folder, cuda_module, device, recorder=recorder)
    prompts = make_prompts([9, 9, 8, 8], VOCAB_SIZE)

    outputs = [engine.generate([prompt], 1)[0] for prompt in prompts]

    assert [output.token_ids for output in outputs] == reference.greedy(model, prompts, 1)
    assert (recorder.num_graphs, recorder.num_piecewise_replays) == (1, 1)


def test_quantised_weights_are_decoded_within_a_piece(
    tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    """By the kernel for 8 tokens, as floats for 20."""
    model, _ = make_small_checkpoint("qwen3", tmp_path)
    path = tmp_path / "m.gguf"
    save_gguf(model, path, "qwen3", quantization=GGMLQuantizationType.Q8_0)
    recorder = ReplayingRecorder(device)
    eager = CUDAEngine(path, cuda_module, device, max_num_tokens=20)
    engine = CUDAEngine(path, cuda_module, device, recorder=recorder, max_num_tokens=20)

    for prompt in make_prompts([8, 6, 20, 18], VOCAB_SIZE):
        (output,) = engine.generate([prompt], 1)
        assert output.token_ids == eager.generate([prompt], 1)[0].token_ids

    assert recorder.num_piecewise_replays == 2


def test_padding_is_not_written_to_the_cache(
    tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    _, folder = make_small_checkpoint("qwen3", tmp_path)
    recorder = ReplayingRecorder(device)
    runner = CUDAEngine(folder, cuda_module, device, recorder=recorder, num_blocks=4).runner
    for cache in runner._kv.layers:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))

    for name, block_id in (("a", 1), ("b", 3)):
        sequence = NewSequence(name, [3, 4, 5, 6, 7], 5, SamplingParams(), ([block_id],))
        runner.launch(StepPlan([name], [0], [5], [True], new=[sequence])).wait()

    assert recorder.num_piecewise_replays == 1
    for cache in runner._kv.layers:
        for tensor in (cache.k, cache.v):
            is_written = tensor.isfinite().all(3).all(2).cpu()
            assert is_written.sum(1).tolist() == [0, 5, 0, 5]
            assert bool(is_written[[1, 3], :5].all())
