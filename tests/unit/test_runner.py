"""Plans applied to a small random model: releases, resumptions, copies, failures, probes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from llmserve.core import NewSequence, SamplingParams, SeqResult, StepPlan
from llmserve.errors import StartupError
from llmserve.executor import UniprocExecutor
from llmserve.files.model import open_model
from llmserve.runner import LoadedRunner, ModelRunner, load_runner

PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = SamplingParams(temperature=0.0)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def load(folder: Path, *, changes: dict[str, Any] | None = None, **cache: Any) -> LoadedRunner:
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    config = ServerConfig(
        model=ModelConfig(model=str(folder), load_format="dummy", seed=3),
        cache=CacheConfig(**{"block_size": 4} | cache),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    return load_runner(open_model(config.model, lambda line: None), config)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    return load(tmp_path).runner


def new(request_id: str, token_ids: list[int], block_ids: list[int], **others: Any) -> NewSequence:
    sampling = others.pop("sampling", GREEDY)
    num_prompt = others.pop("num_prompt_tokens", len(token_ids))
    return NewSequence(request_id, token_ids, num_prompt, sampling, (block_ids,))


def prefill(request_id: str, token_ids: list[int], block_ids: list[int], **others: Any) -> StepPlan:
    sequence = new(request_id, token_ids, block_ids, **others)
    return StepPlan([request_id], [0], [len(token_ids)], [True], new=[sequence])


def decode(request_id: str, num_computed: int, **others: Any) -> StepPlan:
    return StepPlan([request_id], [num_computed], [1], [True], **others)


def continuation(runner: ModelRunner, num_tokens: int, request_id: str = "whole") -> list[int]:
    """Greedy tokens after PROMPT, by the plainest plans, on blocks 10 to 13."""
    tokens = list(
        runner.execute(prefill(request_id, PROMPT, [10, 11, 12, 13])).sequences[0].token_ids
    )
    for step in range(num_tokens - 1):
        tokens += runner.execute(decode(request_id, len(PROMPT) + step)).sequences[0].token_ids
    runner.forget([request_id])
    return tokens


def test_sampled_token_is_the_next_input(runner: ModelRunner) -> None:
    first = continuation(runner, 5)

    # The same tokens given as a prompt must lead to the same next token.
    result = runner.execute(prefill("b", PROMPT + first[:4], [1, 2, 3]))

    assert result.sequences[0].token_ids == (first[4],)


def test_sequence_released_and_new_in_one_plan_resumes(runner: ModelRunner) -> None:
    expected = continuation(runner, 6)
    runner.execute(prefill("a", PROMPT, [1, 2]))
    runner.execute(decode("a", 6))

    plan = prefill("a", PROMPT + expected[:2], [5, 6], num_prompt_tokens=len(PROMPT))
    plan.released_ids = ["a"]
    resumed = runner.execute(plan)
    after = runner.execute(decode("a", 8, new_block_ids={"a": ([7],)}))

    assert resumed.sequences[0].token_ids == (expected[2],)
    assert after.sequences[0].token_ids == (expected[3],)


def test_chunk_of_a_prompt_samples_nothing(runner: ModelRunner) -> None:
    expected = continuation(runner, 1)
    first = StepPlan(["a"], [0], [4], [False], new=[new("a", PROMPT, [1])])
    second = StepPlan(["a"], [4], [2], [True], new_block_ids={"a": ([2],)})

    results = [runner.execute(plan).sequences[0] for plan in (first, second)]

    assert results == [SeqResult(), SeqResult((expected[0],))]


def test_results_come_in_the_order_of_the_plan(runner: ModelRunner) -> None:
    expected = continuation(runner, 2)
    runner.execute(prefill("a", PROMPT, [1, 2]))

    plan = StepPlan(
        ["b", "a", "c"],
        [0, 6, 0],
        [3, 1, 6],
        [False, True, True],
        new=[new("b", PROMPT, [3, 4]), new("c", PROMPT, [5, 6])],
    )
    results = runner.execute(plan).sequences

    assert results[0] == SeqResult()
    assert results[1].token_ids == (expected[1],)
    assert results[2].token_ids == (expected[0],)


def test_copied_block_serves_a_fork(runner: ModelRunner) -> None:
    expected = continuation(runner, 1)
    runner.execute(prefill("a", PROMPT, [1, 2]))

    # Block 1 is shared; block 2 is copied, and its last slot computed again.
    plan = StepPlan(["b"], [5], [1], [True], new=[new("b", PROMPT, [1, 3])], block_copies=[(2, 3)])

    assert runner.execute(plan).sequences[0].token_ids == (expected[0],)


def test_failed_step_leaves_a_sound_state(runner: ModelRunner) -> None:
    expected = continuation(runner, 3)
    runner.execute(prefill("a", PROMPT, [1, 2]))

    # A block outside the cache: the kernels refuse it in the middle of the forward pass.
    with pytest.raises(IndexError):
        runner.execute(prefill("bad", PROMPT, [3, 1 << 20]))
    with pytest.raises(KeyError):
        runner.execute(decode("unknown", 3))
    plan = decode("a", 6, released_ids=["bad", "unknown"])

    assert runner.execute(plan).sequences[0].token_ids == (expected[1],)
    runner.probe()
    assert continuation(runner, 3) == expected


def test_every_row_can_be_used_again_after_release(runner: ModelRunner) -> None:
    expected = continuation(runner, 1)

    for round in range(10):
        ids = [f"{round}-{index}" for index in range(4)]
        sequences = [new(id, PROMPT, [1 + 2 * i, 2 + 2 * i]) for i, id in enumerate(ids)]
        released = [f"{round - 1}-{index}" for index in range(4)] if round else []
        plan = StepPlan(ids, [0] * 4, [6] * 4, [True] * 4, new=sequences, released_ids=released)
        runner.probe()
        results = runner.execute(plan).sequences
        assert [result.token_ids for result in results] == [(expected[0],)] * 4


def test_empty_plan_applies_its_releases(runner: ModelRunner) -> None:
    runner.execute(prefill("a", PROMPT, [1, 2]))

    assert runner.execute(StepPlan(released_ids=["a"])).sequences == []
    with pytest.raises(KeyError):
        runner.execute(decode("a", 6))


def test_prompt_logprobs_of_chunks_join_to_one_entry_per_token(runner: ModelRunner) -> None:
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    whole = runner.execute(prefill("w", PROMPT, [1, 2], sampling=sampling)).sequences[0]
    runner.forget(["w"])
    plans = [
        StepPlan(["a"], [0], [1], [False], new=[new("a", PROMPT, [3, 4], sampling=sampling)]),
        StepPlan(["a"], [1], [4], [False]),
        StepPlan(["a"], [5], [1], [True]),
        decode("a", 6),
    ]

    parts = [runner.execute(plan).sequences[0].prompt_logprobs for plan in plans]

    assert whole.prompt_logprobs is not None
    assert [len(part) if part is not None else None for part in parts] == [2, 4, 0, None]
    joined = [entry for part in parts for entry in part or []]
    assert joined[0] is whole.prompt_logprobs[0] is None
    for entry, other, token_id in zip(
        joined[1:], whole.prompt_logprobs[1:], PROMPT[1:], strict=True
    ):
        assert entry is not None
        assert other is not None
        assert entry.token_id == other.token_id == token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_sequence_that_resumes_with_output_does_not_repeat_prompt_logprobs(
    runner: ModelRunner,
) -> None:
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    plan = prefill("a", [*PROMPT, 3], [1, 2], sampling=sampling, num_prompt_tokens=len(PROMPT))

    assert runner.execute(plan).sequences[0].prompt_logprobs is None


def test_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    runner = load(tmp_path).runner
    expected = continuation(runner, 2)
    runner.execute(prefill("a", PROMPT, [1, 2]))
    runner.execute(prefill("b", PROMPT, [3, 4]))
    for layer in runner._kv.layers:
        layer.k[4] = torch.nan

    plan = StepPlan(["b", "a"], [6, 6], [1, 1], [True, True])
    broken, fine = runner.execute(plan).sequences

    assert broken.error is not None
    assert broken.token_ids == ()
    assert fine.token_ids == (expected[1],)


def test_executor_runs_the_plan_in_this_thread(runner: ModelRunner) -> None:
    expected = continuation(runner, 1)
    executor = UniprocExecutor(runner)

    executor.probe()

    result = executor.launch(prefill("a", PROMPT, [1, 2])).wait()
    assert result.sequences[0].token_ids == (expected[0],)


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    assert continuation(load(tmp_path).runner, 8) == continuation(load(tmp_path).runner, 8)


def test_window_longer_than_the_context_makes_no_group_of_its_own(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}

    (group,) = load(tmp_path, changes=changes).kv_spec.groups

    assert group.sliding_window is None


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    with pytest.raises(StartupError):
        open_model(ModelConfig(model=str(tmp_path)), lambda line: None)
