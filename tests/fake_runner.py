"""A runner without a model, whose tokens depend on the content of its KV cache.

FakeRunner keeps a real slot of memory per token and applies step plans as documented. What it
stores at a position depends on everything that the position may see, and so does the token that it
samples: a wrong block table, a block given to two sequences or a missing copy changes the output.
`reference_tokens` computes the same tokens without blocks, batches and chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.core import (
    KVCacheSpec,
    SamplingParams,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

_MASK = (1 << 64) - 1
_GARBAGE = 0xDEAD_BEEF_DEAD_BEEF  # what slots hold that were never written


def _mix(*values: int) -> int:
    """64 well-mixed bits of some integers: the finalizer of SplitMix64, chained."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _attend(contents: np.ndarray) -> int:
    """One number for what a position sees. `contents`: uint64, oldest first; order matters."""
    weights = np.arange(1, 2 * len(contents), 2, dtype=np.uint64)
    return int((contents * weights).sum(dtype=np.uint64))


def _token(seen: int, sampling: SamplingParams, num_output_tokens: int, vocab_size: int) -> int:
    seed = 0 if sampling.is_greedy else sampling.seed + 1
    return _mix(seen, seed, num_output_tokens) % vocab_size


def reference_tokens(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    windows: Sequence[int | None],
    vocab_size: int = 256,
) -> list[int]:
    """The first `num_tokens` output tokens of a FakeRunner; stop rules are not applied."""
    tokens = list(prompt_token_ids)
    contents = np.empty((len(windows), len(tokens) + num_tokens), dtype=np.uint64)
    seen = 0
    for position in range(len(tokens) + num_tokens - 1):
        seen = 0
        for group, window in enumerate(windows):
            start = 0 if window is None else max(0, position + 1 - window)
            before = contents[group, start:position]
            own = _mix(tokens[position], position, group, _attend(before))
            contents[group, position] = own
            seen = _mix(seen, _attend(contents[group, start : position + 1]))
        if position + 1 >= len(tokens):
            num_output_tokens = len(tokens) - len(prompt_token_ids)
            tokens.append(_token(seen, sampling, num_output_tokens, vocab_size))
    return tokens[len(prompt_token_ids) :]


@dataclass
class _Row:
    """A sequence that the runner holds."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_tables: list[list[int]]
    is_broken: bool = False  # it lacks a token; what it gives from now on must not matter


class FakeRunner:
    """Executes step plans.

    `script`: output tokens of every sequence, by index; the last one repeats. Without it tokens
    are hashes of the cache content. `step_delay_s`: how long a step takes. `fails`: a step for
    which it returns true raises RuntimeError and leaves garbage in the slots it was to write.
    `fails_alone`: a sequence for which it returns true in a step gives an error instead of a token.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        vocab_size: int = 256,
        script: Sequence[int] | None = None,
        step_delay_s: float = 0.0,
        fails: Callable[[StepPlan], bool] | None = None,
        fails_alone: Callable[[str], bool] | None = None,
    ) -> None:
        self.num_steps = 0
        self.num_probes = 0
        self._spec = spec
        self._vocab_size = vocab_size
        self._script = script
        self._step_delay_s = step_delay_s
        self._fails = fails
        self._fails_alone = fails_alone
        self._slots = np.full((num_blocks, spec.block_size), _GARBAGE, dtype=np.uint64)
        self._rows: dict[str, _Row] = {}

    @property
    def num_rows(self) -> int:
        """Sequences that were not released yet."""
        return len(self._rows)

    def probe(self) -> None:
        self.num_probes += 1

    def execute(self, plan: StepPlan) -> StepResult:
        """One step. AssertionError if the plan breaks its contract."""
        self.num_steps += 1
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        self._apply_changes(plan)
        self._check_writes(plan)
        if self._fails is not None and self._fails(plan):
            self._spoil(plan)
            raise RuntimeError("injected failure")
        return StepResult(
            [
                self._run(request_id, num_computed, num_scheduled, is_sampling)
                for request_id, num_computed, num_scheduled, is_sampling in zip(
                    plan.request_ids,
                    plan.num_computed_tokens,
                    plan.num_scheduled_tokens,
                    plan.is_sampling,
                    strict=True,
                )
            ]
        )

    def _apply_changes(self, plan: StepPlan) -> None:
        for request_id in plan.released_ids:
            self._rows.pop(request_id, None)
        for new in plan.new:
            assert new.request_id not in self._rows, f"{new.request_id} was not released"
            self._rows[new.request_id] = _Row(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.sampling,
                [list(table) for table in new.block_ids],
            )
        for request_id, tables in plan.new_block_ids.items():
            for table, added in zip(self._rows[request_id].block_tables, tables, strict=True):
                table += added
        for source, target in plan.block_copies:
            self._slots[target] = self._slots[source]

    def _check_writes(self, plan: StepPlan) -> None:
        """No block is written by two sequences, nor by one while another reads it."""
        assert sum(plan.num_scheduled_tokens) == plan.total_num_scheduled_tokens
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        written: dict[int, str] = {}
        for request_id, start, count in zip(
            plan.request_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            assert count > 0
            for table in self._rows[request_id].block_tables:
                for block_id in self._blocks_of(table, start, start + count):
                    assert block_id > 0, f"{request_id} writes to the null block"
                    assert block_id not in written, f"block {block_id} is written twice"
                    written[block_id] = request_id
        for request_id, start in zip(plan.request_ids, plan.num_computed_tokens, strict=True):
            row = self._rows[request_id]
            for table, group in zip(row.block_tables, self._spec.groups, strict=True):
                first = max(0, start + 1 - (group.sliding_window or start + 1))
                for block_id in self._blocks_of(table, first, start):
                    assert block_id > 0, f"{request_id} reads the null block"
                    assert written.get(block_id, request_id) == request_id

    def _spoil(self, plan: StepPlan) -> None:
        size = self._spec.block_size
        for request_id, start, count in zip(
            plan.request_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            self._rows[request_id].is_broken = True
            for table in self._rows[request_id].block_tables:
                for position in range(start, start + count):
                    self._slots[table[position // size], position % size] = _GARBAGE

    def _blocks_of(self, table: list[int], start: int, end: int) -> list[int]:
        size = self._spec.block_size
        assert end <= len(table) * size, "the block table is too short"
        return table[start // size : -(-end // size)]

    def _run(
        self, request_id: str, num_computed: int, num_scheduled: int, is_sampling: bool
    ) -> SeqResult:
        row = self._rows[request_id]
        if row.is_broken:
            return SeqResult((0,) if is_sampling else ())
        if is_sampling and self._fails_alone is not None and self._fails_alone(request_id):
            row.is_broken = True
            return SeqResult(error="injected failure")
        end = num_computed + num_scheduled
        assert end <= len(row.token_ids)
        assert is_sampling == (end == len(row.token_ids))
        seen = 0
        for position in range(num_computed, end):
            seen = self._compute(row, position)
        prompt_logprobs = None
        if row.sampling.num_prompt_logprobs is not None and num_computed < row.num_prompt_tokens:
            prompt_logprobs = [
                TokenLogprobs(row.token_ids[i], -1.0, 1) if i else None
                for i in range(num_computed, min(end, row.num_prompt_tokens))
            ]
        if not is_sampling:
            return SeqResult(prompt_logprobs=prompt_logprobs)
        token_id = self._sample(row, seen)
        row.token_ids.append(token_id)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row.sampling.num_logprobs is not None:
            logprobs = (_logprobs(token_id, row.sampling.num_logprobs, self._vocab_size),)
        return SeqResult((token_id,), logprobs, prompt_logprobs)

    def _sample(self, row: _Row, seen: int) -> int:
        num_output_tokens = len(row.token_ids) - row.num_prompt_tokens
        if self._script is not None:
            return self._script[min(num_output_tokens, len(self._script) - 1)]
        return _token(seen, row.sampling, num_output_tokens, self._vocab_size)

    def _compute(self, row: _Row, position: int) -> int:
        """Writes one position of every group; returns what the position sees."""
        size = self._spec.block_size
        seen = 0
        for group, table in enumerate(row.block_tables):
            window = self._spec.groups[group].sliding_window
            start = 0 if window is None else max(0, position + 1 - window)
            first = start // size
            blocks = self._slots[table[first : position // size + 1]].reshape(-1)
            visible = blocks[start - first * size : position + 1 - first * size]
            own = _mix(row.token_ids[position], position, group, _attend(visible[:-1]))
            visible[-1] = own
            self._slots[table[position // size], position % size] = own
            seen = _mix(seen, _attend(visible))
        return seen


def _logprobs(token_id: int, k: int, vocab_size: int) -> TokenLogprobs:
    """Made-up log-probabilities: the sampled token is the most likely one."""
    top_ids = tuple((token_id + i) % vocab_size for i in range(k))
    return TokenLogprobs(token_id, -0.5, 1, top_ids, tuple(-0.5 - i for i in range(k)))
