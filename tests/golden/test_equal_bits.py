"""One request gives the same tokens and logprobs to the last bit, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from llmserve import kernels
from tests.golden import reference
from tests.golden.conftest import Checkpoint
from tests.golden.tiny_engine import TinyEngine, make_prompts
from tests.make_checkpoints import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.make_gguf import save_gguf

NUM_TOKENS = 24
MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "m.gguf"
    kind = GGMLQuantizationType.Q8_0
    save_gguf(make_model(ARCHITECTURES["gemma3"]), path, "gemma3", quantization=kind)
    return path


def test_request_alone_equals_request_among_32(quantised: Path) -> None:
    prompts = make_prompts([5, 16, 17, 45] * 8, VOCAB_SIZE)
    together = TinyEngine(quantised, max_model_len=MAX_MODEL_LEN)
    alone = TinyEngine(quantised, cache={"enable_prefix_caching": False}, max_model_len=128)

    outputs = together.generate(prompts, NUM_TOKENS, num_logprobs=3)

    for prompt, output in zip(prompts[:6], outputs, strict=False):
        assert alone.generate([prompt], NUM_TOKENS, num_logprobs=3)[0] == output


def test_chunk_size_changes_no_bit(quantised: Path) -> None:
    prompts = make_prompts([70], VOCAB_SIZE)
    sampling = {"num_logprobs": 3, "num_prompt_logprobs": 2}
    whole = TinyEngine(quantised, max_model_len=MAX_MODEL_LEN)
    chunked = TinyEngine(
        quantised,
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 9},
        max_model_len=MAX_MODEL_LEN,
    )

    assert chunked.generate(prompts, NUM_TOKENS, **sampling) == whole.generate(
        prompts, NUM_TOKENS, **sampling
    )


def test_number_of_threads_changes_no_bit(quantised: Path) -> None:
    prompts = make_prompts([45, 7], VOCAB_SIZE)
    before = kernels.get_num_threads()
    try:
        outputs = [
            TinyEngine(quantised, threads=threads, max_model_len=MAX_MODEL_LEN).generate(
                prompts, NUM_TOKENS, num_logprobs=3
            )
            for threads in (1, 2)
        ]
    finally:
        kernels.set_num_threads(before)

    assert outputs[0] == outputs[1]


def test_seeded_sampling_does_not_depend_on_the_batch(quantised: Path) -> None:
    prompts = make_prompts([9, 20, 33, 40], VOCAB_SIZE)
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    engine = TinyEngine(quantised, max_model_len=MAX_MODEL_LEN)

    together = engine.generate(prompts, NUM_TOKENS, **sampling)
    alone = [engine.generate([prompt], NUM_TOKENS, **sampling)[0] for prompt in prompts]

    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize("budget", [512, 9])
def test_prompt_logprobs_are_those_of_transformers_position_by_position(
    budget: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    model, folder = checkpoint("gemma2")
    (prompt,) = make_prompts([40], VOCAB_SIZE)
    engine = TinyEngine(
        folder,
        cache={"kv_cache_dtype": "float32"},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": budget},
    )

    (output,) = engine.generate([prompt], 2, num_prompt_logprobs=1, num_logprobs=0)

    expected = reference.logits(model, prompt).log_softmax(-1)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        row = expected[position - 1]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-4)
        assert entry.top_ids == (int(row.argmax()),)
    first = expected[-1]
    assert output.logprobs[0].logprob == pytest.approx(first.max().item(), abs=1e-4)


def test_forked_choices_continue_a_shared_prompt(quantised: Path) -> None:
    (prompt,) = make_prompts([21], VOCAB_SIZE)
    engine = TinyEngine(quantised, max_model_len=MAX_MODEL_LEN)

    (single,) = engine.generate([prompt], NUM_TOKENS)
    choices = engine.generate_choices(prompt, 3, NUM_TOKENS)

    assert [choice.token_ids for choice in choices] == [single.token_ids] * 3


def test_torch_threads_do_not_change_rotary_tables() -> None:
    from llmserve.layers import RopeConfig, RotaryTable

    before = torch.get_num_threads()
    rope = RopeConfig(theta=10_000.0, rotary_dim=20, max_position=4096)
    tables = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            table = RotaryTable(rope, 4096, torch.device("cpu"))
            table.reserve(4096)
            q, k = torch.ones(4096, 1, 20), torch.ones(4096, 1, 20)
            tables_of = table.parameters
            kernels.rotary(q, k, torch.arange(4096), tables_of.cos, tables_of.sin)
            tables.append(q)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(tables[0], tables[1])
