"""Greedy tokens of every architecture equal those of transformers, however they are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.golden import reference
from tests.golden.conftest import Checkpoint
from tests.golden.tiny_engine import TinyEngine, make_prompts
from tests.make_checkpoints import ARCHITECTURES, VOCAB_SIZE

# Shorter and longer than a block, a chunk and a window of the tiny models.
LENGTHS = [5] * 10 + [45] * 10
NUM_TOKENS = 64
FLOAT32 = {"kv_cache_dtype": "float32"}
# Up to here LongRoPE keeps its short factors, for us and for transformers.
MAX_MODEL_LEN = 128

# Of a batch, per architecture: our tokens and those of transformers.
_tokens: dict[str, tuple[list[list[int]], list[list[int]]]] = {}


@pytest.fixture
def prompts() -> list[list[int]]:
    return make_prompts(LENGTHS, VOCAB_SIZE)


@pytest.fixture
def tokens(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Checkpoint],
    prompts: list[list[int]],
) -> tuple[list[list[int]], list[list[int]]]:
    name = request.node.callspec.params["name"]
    if name not in _tokens:
        model, folder = checkpoint(name)
        engine = TinyEngine(folder, cache=FLOAT32, max_model_len=MAX_MODEL_LEN)
        ours = [output.token_ids for output in engine.generate(prompts, NUM_TOKENS)]
        _tokens[name] = ours, reference.greedy(model, prompts, NUM_TOKENS, guesses=ours)
    return _tokens[name]


@pytest.fixture
def expected(tokens: tuple[list[list[int]], list[list[int]]]) -> list[list[int]]:
    return tokens[1]


all_architectures = pytest.mark.parametrize("name", ARCHITECTURES)


@all_architectures
def test_tokens_of_a_batch_equal_transformers(
    name: str, tokens: tuple[list[list[int]], list[list[int]]]
) -> None:
    ours, theirs = tokens

    assert ours == theirs


@all_architectures
def test_tokens_of_chunked_prompts_equal_transformers(
    name: str,
    checkpoint: Callable[[str], Checkpoint],
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    engine = TinyEngine(
        checkpoint(name)[1],
        cache=FLOAT32 | {"block_size": 8},
        scheduler={"max_num_seqs": 16, "max_num_batched_tokens": 19},
        max_model_len=MAX_MODEL_LEN,
    )

    outputs = engine.generate(prompts, NUM_TOKENS)

    assert [output.token_ids for output in outputs] == expected


@all_architectures
def test_tokens_survive_preemption(
    name: str,
    checkpoint: Callable[[str], Checkpoint],
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    folder = checkpoint(name)[1]
    ample = TinyEngine(folder, cache=FLOAT32, max_model_len=MAX_MODEL_LEN)
    num_blocks = ample.loaded.num_blocks // 10  # ample holds 32 sequences of full length
    engine = TinyEngine(
        folder,
        cache=FLOAT32 | {"num_gpu_blocks_override": num_blocks},
        max_model_len=MAX_MODEL_LEN,
    )

    outputs = engine.generate(prompts, NUM_TOKENS)

    assert engine.scheduler.num_preemptions > 0
    assert [output.token_ids for output in outputs] == expected


@all_architectures
def test_warm_prefix_cache_gives_the_same_tokens_and_logprobs_bit_for_bit(
    name: str,
    checkpoint: Callable[[str], Checkpoint],
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    engine = TinyEngine(checkpoint(name)[1], cache=FLOAT32, max_model_len=MAX_MODEL_LEN)

    cold = engine.generate(prompts[-1:], NUM_TOKENS, num_logprobs=2)
    warm = engine.generate(prompts[-1:], NUM_TOKENS, num_logprobs=2)

    assert cold[0].num_cached_tokens == 0
    assert warm[0].num_cached_tokens > 0
    assert warm[0].token_ids == expected[-1]
    assert warm[0].logprobs == cold[0].logprobs
