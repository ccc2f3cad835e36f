"""Where memory goes: from settings and free memory to the number of KV cache blocks.

Nothing is allocated here. What does not fit is either a shorter context (if --max-model-len was not
given) or a StartupError that says which values would fit.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import KVCacheSpec, group_layers
from llmserve.core.capacity import max_blocks_per_sequence, max_tokens_that_fit
from llmserve.errors import StartupError
from llmserve.models import DecoderConfig

logger = logging.getLogger(__name__)

_DEFAULT_CACHE_BYTES = 128 << 20
_MAX_LOGIT_ROWS = 16
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A part of memory and what it is for."""

    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The parts of memory, for a person to read."""

    rows: tuple[BudgetRow, ...]

    def lines(self) -> list[str]:
        return [f"{row.name:<12} {row.num_bytes / _MIB:9.1f} MiB  {row.note}" for row in self.rows]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`num_blocks` counts the null block."""

    max_model_len: int
    kv_spec: KVCacheSpec
    num_blocks: int
    budget: MemoryBudget


def plan_memory(
    model: DecoderConfig,
    weight_bytes: int,
    kv_dtype: str,
    max_model_len: int | None,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    available_bytes: int,
    activation_bytes: int | None = None,
) -> MemoryPlan:
    """Divides `available_bytes`, which the weights are still part of.

    activation_bytes: on a GPU, what a step needs; the KV cache then has all that is left. On the
    CPU, None, it takes what one sequence needs. kv_dtype: for --kv-cache-dtype auto.
    max_model_len: the setting; None means the model's context, or as much of it as fits. Raises
    StartupError.
    """
    wanted_len = _wanted_len(model, max_model_len)
    spec = make_kv_spec(model, cache, kv_dtype, wanted_len)
    step_tokens = _max_step_tokens(scheduler)
    num_needed = max_blocks_per_sequence(spec, wanted_len, step_tokens) + 1
    free_bytes = max(0, available_bytes - weight_bytes - (activation_bytes or 0))
    takes_all = activation_bytes is not None
    num_blocks, flag = _num_blocks(spec, cache, num_needed, free_bytes, takes_all=takes_all)
    if flag is None:
        # More than this many no mix of requests can use.
        num_blocks = min(num_blocks, (num_needed - 1) * scheduler.max_num_seqs + 1)
    fitting_len = max_tokens_that_fit(spec, num_blocks, step_tokens, wanted_len)
    if fitting_len < wanted_len:
        _check_fit(spec, num_blocks, num_needed, fitting_len, max_model_len, flag)
        logger.warning(
            "context lowered from %d to %d tokens: more do not fit into the KV cache of %.0f MiB; "
            "--kv-cache-memory-bytes %d would hold them all",
            wanted_len,
            fitting_len,
            num_blocks * spec.bytes_per_block / _MIB,
            num_needed * spec.bytes_per_block,
        )
    return MemoryPlan(
        fitting_len,
        spec,
        num_blocks,
        _budget(
            model,
            spec,
            scheduler,
            num_blocks,
            max_blocks_per_sequence(spec, fitting_len, step_tokens),
            fitting_len,
            weight_bytes,
            available_bytes,
            activation_bytes,
        ),
    )


def make_kv_spec(
    model: DecoderConfig, cache: CacheConfig, kv_dtype: str, max_model_len: int
) -> KVCacheSpec:
    """A window that no sequence outgrows counts as none: its layers join the others."""
    windows = [layer.sliding_window for layer in model.layers]
    return KVCacheSpec(
        groups=group_layers([w if w is not None and w < max_model_len else None for w in windows]),
        block_size=cache.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype,
    )


def max_logit_rows(max_num_seqs: int) -> int:
    """Rows of logits that are held at once; more sequences sample in slices of as many."""
    return min(_MAX_LOGIT_ROWS, max_num_seqs)


def available_memory() -> int:
    """Bytes that this process may still take, within its control group's limit if it has one."""
    limits = [_system_available()]
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            limits.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or one of another version
    return max(0, min(limits))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _wanted_len(model: DecoderConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return model.max_context
    if max_model_len > model.max_context:
        raise StartupError(
            f"--max-model-len is {max_model_len}; the model's context is {model.max_context} tokens"
        )
    return max_model_len


def _max_step_tokens(scheduler: SchedulerConfig) -> int:
    """Most tokens of one sequence in one step."""
    budget = scheduler.token_budget
    return min(budget, scheduler.long_prefill_token_threshold or budget)


def _num_blocks(
    spec: KVCacheSpec, cache: CacheConfig, num_needed: int, free_bytes: int, *, takes_all: bool
) -> tuple[int, str | None]:
    """The number of blocks and the flag that set it."""
    if cache.kv_cache_memory_bytes is not None:
        if cache.kv_cache_memory_bytes > free_bytes:
            raise StartupError(
                f"--kv-cache-memory-bytes is {cache.kv_cache_memory_bytes}; beside the weights "
                f"{free_bytes} bytes of memory are available"
            )
        return cache.kv_cache_memory_bytes // spec.bytes_per_block, "--kv-cache-memory-bytes"
    if cache.num_gpu_blocks_override is not None:
        if cache.num_gpu_blocks_override * spec.bytes_per_block > free_bytes:
            raise StartupError(
                f"--num-gpu-blocks-override is {cache.num_gpu_blocks_override}; beside the weights "
                f"there is memory for {free_bytes // spec.bytes_per_block} blocks"
            )
        return cache.num_gpu_blocks_override, "--num-gpu-blocks-override"
    if takes_all:
        return free_bytes // spec.bytes_per_block, None
    wanted_bytes = max(_DEFAULT_CACHE_BYTES, num_needed * spec.bytes_per_block)
    return min(wanted_bytes, free_bytes // 2) // spec.bytes_per_block, None


def _check_fit(
    spec: KVCacheSpec,
    num_blocks: int,
    num_needed: int,
    fitting_len: int,
    max_model_len: int | None,
    flag: str | None,
) -> None:
    """Raises unless the context may be lowered to `fitting_len`."""
    if max_model_len is None and fitting_len > 0:
        return
    is_count = flag == "--num-gpu-blocks-override"
    needed = num_needed if is_count else num_needed * spec.bytes_per_block
    remedy = f"{flag or '--kv-cache-memory-bytes'} {needed}"
    if fitting_len > 0:
        remedy = f"--max-model-len {fitting_len} or {remedy}"
    wanted = "the model's context" if max_model_len is None else f"--max-model-len {max_model_len}"
    raise StartupError(
        f"{wanted} needs {num_needed} KV cache blocks and there are {num_blocks}"
        f"{f' by {flag}' if flag else ''}, enough for {fitting_len} tokens; set {remedy}"
    )


def _budget(
    model: DecoderConfig,
    spec: KVCacheSpec,
    scheduler: SchedulerConfig,
    num_blocks: int,
    blocks_per_context: int,
    max_model_len: int,
    weight_bytes: int,
    available_bytes: int,
    measured_bytes: int | None,
) -> MemoryBudget:
    """Raises StartupError for steps of more tokens than there can be memory for."""
    cache_bytes = num_blocks * spec.bytes_per_block
    # No step has more tokens than the cache holds.
    num_tokens = min(scheduler.token_budget, (num_blocks - 1) * spec.block_size)
    activation_bytes = measured_bytes or estimate_activations(
        model, num_tokens, scheduler.max_num_seqs
    )
    if activation_bytes > available_bytes:
        raise StartupError(
            f"--max-num-batched-tokens is {scheduler.token_budget}; a step of {num_tokens} tokens "
            f"needs {activation_bytes} bytes, and {available_bytes} are available"
        )
    rest = available_bytes - weight_bytes - cache_bytes - activation_bytes
    share = (num_blocks - 1) / blocks_per_context
    capacity = f"{share:.1f} x {max_model_len} tokens"
    if len(spec.groups) > 1:
        # Each group needs blocks of its own, until a sequence outgrows the window.
        short = (num_blocks - 1) // len(spec.groups) * spec.block_size
        capacity += f", or {short} in short sequences"
    return MemoryBudget(
        (
            BudgetRow("weights", weight_bytes, "in the types that they are computed with"),
            BudgetRow(
                "KV cache",
                cache_bytes,
                f"{num_blocks} blocks of {spec.block_size} tokens in {spec.dtype}: {capacity}",
            ),
            BudgetRow(
                "activations",
                activation_bytes,
                f"at most, {num_tokens} tokens in a step",
            ),
            BudgetRow("rest", max(0, rest), "left of the memory that was available"),
        )
    )


def estimate_activations(model: DecoderConfig, num_tokens: int, max_num_seqs: int) -> int:
    """Residual stream, one layer's intermediate values, and a slice of logits."""
    num_q = model.num_heads * model.head_dim
    num_kv = model.num_kv_heads * model.head_dim
    attention = 2 * num_q + 2 * num_kv
    mlp = 3 * model.intermediate_size
    per_token = 3 * model.hidden_size + max(attention, mlp)
    logits = max_logit_rows(max_num_seqs) * model.vocab_size
    return 4 * (num_tokens * per_token + logits)
