"""Blocks from settings and free memory, and what is said when it does not fit."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.errors import StartupError
from llmserve.models import DecoderConfig, LayerConfig
from llmserve.runner.memory import MemoryPlan, available_memory, plan_memory

MIB = 1 << 20
WEIGHT_BYTES = 10 * MIB


def make_model(*, context: int = 4096, windows: tuple[int | None, ...] = (None, None)) -> Any:
    return DecoderConfig(
        family="llama",
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_context=context,
        layers=tuple(LayerConfig(window) for window in windows),
    )


def make_plan(
    *,
    model: DecoderConfig | None = None,
    max_model_len: int | None = None,
    available: int = 4096 * MIB,
    scheduler: SchedulerConfig | None = None,
    kv_dtype: str = "float16",
    **cache: Any,
) -> MemoryPlan:
    return plan_memory(
        model or make_model(),
        WEIGHT_BYTES,
        kv_dtype,
        max_model_len,
        CacheConfig(**cache),
        scheduler or SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256),
        available,
    )


# 2 (K and V) x 2 heads x 64 x 2 bytes x 16 tokens x 2 layers.
BLOCK_BYTES = 16_384


def test_default_cache_has_128_mib() -> None:
    plan = make_plan()

    assert plan.kv_spec.bytes_per_block == BLOCK_BYTES
    assert plan.num_blocks * BLOCK_BYTES == 128 * MIB
    assert plan.max_model_len == 4096


def test_default_cache_holds_one_whole_context_if_that_is_more() -> None:
    plan = make_plan(model=make_model(context=1 << 20))

    assert plan.num_blocks == (1 << 20) // 16 + 1
    assert plan.max_model_len == 1 << 20


def test_default_cache_is_not_larger_than_requests_can_use() -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=256)

    plan = make_plan(model=make_model(context=160), scheduler=scheduler)

    assert plan.num_blocks == 2 * 10 + 1


def test_default_cache_takes_at_most_half_of_what_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        plan = make_plan(model=make_model(context=1 << 20), available=WEIGHT_BYTES + 200 * MIB)

    assert plan.num_blocks == 100 * MIB // BLOCK_BYTES
    assert plan.max_model_len == (plan.num_blocks - 1) * 16
    assert f"context lowered from 1048576 to {plan.max_model_len} tokens" in caplog.text


def test_settings_of_the_cache_are_exact() -> None:
    assert make_plan(kv_cache_memory_bytes=100 * BLOCK_BYTES + 5).num_blocks == 100
    assert make_plan(num_gpu_blocks_override=300).num_blocks == 300


def test_context_that_was_asked_for_and_does_not_fit_names_what_would() -> None:
    with pytest.raises(StartupError) as by_count:
        make_plan(max_model_len=4096, num_gpu_blocks_override=8)
    with pytest.raises(StartupError) as by_size:
        make_plan(max_model_len=4096, kv_cache_memory_bytes=9 * BLOCK_BYTES)

    assert str(by_count.value) == (
        "--max-model-len 4096 needs 257 KV cache blocks and there are 8 by "
        "--num-gpu-blocks-override, enough for 112 tokens; "
        "set --max-model-len 112 or --num-gpu-blocks-override 257"
    )
    assert "--max-model-len 128 or --kv-cache-memory-bytes 4210688" in str(by_size.value)
    # The values that the messages name do fit.
    assert make_plan(max_model_len=112, num_gpu_blocks_override=8).max_model_len == 112
    assert make_plan(max_model_len=4096, kv_cache_memory_bytes=4210688).max_model_len == 4096


def test_context_that_was_not_asked_for_is_lowered_to_fit() -> None:
    assert make_plan(num_gpu_blocks_override=8).max_model_len == 112


def test_budget_counts_contexts_of_the_lowered_length() -> None:
    plan = make_plan(kv_cache_memory_bytes=100 * BLOCK_BYTES)

    assert plan.max_model_len == 99 * 16
    assert "100 blocks of 16 tokens in float16: 1.0 x 1584 tokens" in plan.budget.lines()[1]


def test_steps_hold_no_more_tokens_than_the_cache() -> None:
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=100_000_000)

    plan = make_plan(scheduler=scheduler)

    assert f"{(plan.num_blocks - 1) * 16} tokens in a step" in "\n".join(plan.budget.lines())


def test_steps_that_no_memory_holds_are_an_error() -> None:
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=100_000_000)

    with pytest.raises(StartupError, match="--max-num-batched-tokens is 100000000"):
        make_plan(scheduler=scheduler, available=512 * MIB)


def test_cache_for_not_even_one_token_is_an_error() -> None:
    with pytest.raises(StartupError, match="the model's context needs"):
        make_plan(num_gpu_blocks_override=1)


def test_cache_beyond_free_memory_is_an_error() -> None:
    with pytest.raises(StartupError, match="--kv-cache-memory-bytes"):
        make_plan(kv_cache_memory_bytes=1 << 40)
    with pytest.raises(StartupError, match="--num-gpu-blocks-override"):
        make_plan(num_gpu_blocks_override=1 << 30)


def test_context_beyond_the_models_is_an_error() -> None:
    with pytest.raises(StartupError, match="--max-model-len is 5000; the model's context is 4096"):
        make_plan(max_model_len=5000)


def test_sliding_layers_need_their_window_and_a_chunk_only() -> None:
    model = make_model(context=1 << 16, windows=(None, 512))

    plan = make_plan(model=model, num_gpu_blocks_override=4096 + 49 + 1)

    # 65,536 tokens in full; 511 + 256 tokens, from the middle of a block on, in the window.
    assert plan.max_model_len == 1 << 16
    assert make_plan(model=model, num_gpu_blocks_override=4096 + 49).max_model_len < 1 << 16


def test_cache_type_is_the_weights_unless_set() -> None:
    assert make_plan(kv_dtype="bfloat16").kv_spec.dtype == "bfloat16"
    assert make_plan(kv_dtype="bfloat16", kv_cache_dtype="float32").kv_spec.dtype == "float32"


def test_budget_names_every_part_in_lines() -> None:
    plan = make_plan()

    lines = plan.budget.lines()

    assert [row.name for row in plan.budget.rows] == ["weights", "KV cache", "activations", "rest"]
    assert "8192 blocks of 16 tokens in float16: 32.0 x 4096 tokens" in lines[1]
    assert "128.0 MiB" in lines[1]
    assert sum(row.num_bytes for row in plan.budget.rows) == 4096 * MIB


def test_available_memory_is_a_plausible_number() -> None:
    assert 16 * MIB < available_memory() < 1 << 50


def test_logits_are_held_for_some_rows_only_however_many_sequences_run() -> None:
    few = make_plan(
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)
    ).budget.rows[2]
    many = make_plan(
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=512)
    ).budget.rows[2]

    assert few.name == "activations"
    assert few.num_bytes == many.num_bytes


def test_budget_says_what_the_cache_holds_of_sequences_that_no_window_cuts() -> None:
    plan = make_plan(model=make_model(windows=(None, 512)))

    num_tokens = (plan.num_blocks - 1) // 2 * 16
    assert f"or {num_tokens} in short sequences" in plan.budget.lines()[1]
