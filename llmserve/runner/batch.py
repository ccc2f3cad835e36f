"""Rows of the sequences that the runner holds, and from a plan to the tensors of a forward pass.

A row keeps a sequence's tokens and block tables, so that a plan only has to say what changed. All
per-token work is one compiled call (`build`) or numpy over whole steps (`arrange`, for a device);
nothing here loops over tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmserve.core import NewSequence, StepPlan
from llmserve.kernels import step_gather
from llmserve.models import ForwardBatch
from llmserve.runner.step_buffers import StepBuffers, StepShape

Ints = npt.NDArray[np.int64]

_BLOCKS_AT_ONCE = 16  # by which block tables grow


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's input. `rows[i]` belongs to the i-th sequence of the plan."""

    forward: ForwardBatch
    rows: list[int]
    cu_seqlens: npt.NDArray[np.int32]  # [num_seqs + 1]

    @property
    def last_token_idx(self) -> npt.NDArray[np.int32]:
        """Where each sequence's last scheduled token is among the step's tokens."""
        return self.cu_seqlens[1:] - 1


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step's input as arrays; shapes and meanings as in AttentionInputs and StepBatch."""

    token_ids: Ints
    positions: Ints
    slots: Ints  # [num_groups, num_tokens]
    tables: npt.NDArray[np.int32]  # [num_groups, num_seqs, max_blocks]
    seq_lens: Ints
    cu_seqlens: Ints
    rows: Ints
    row_of_token: Ints  # [num_tokens]
    max_query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.rows)


class SequenceRows:
    """Tokens and block tables by request id.

    Invariants: a row has one holder or is free; `num_tokens[row]` tokens and, per group,
    `num_blocks[group, row]` block ids of it are valid, what lies behind them is undefined.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._row_of: dict[str, int] = {}
        # np.zeros takes memory from the system on first touch only.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self._tables = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self._num_blocks = np.zeros((num_groups, max_num_seqs), np.int64)
        self._is_last_unknown = np.zeros(max_num_seqs, bool)
        self._buffers = StepBuffers(StepShape(0, 0, 0, 0, 0), num_groups)
        self._gather = step_gather(self.token_ids, self._tables, block_size, self._buffers.arrays)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def row(self, request_id: str) -> int:
        """Raises KeyError for a sequence without a row."""
        return self._row_of[request_id]

    def release(self, request_id: str) -> None:
        """Frees the row; a sequence without one is no error."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def add(self, sequence: NewSequence) -> None:
        """Raises RuntimeError if the plan holds more sequences than max_num_seqs."""
        self.release(sequence.request_id)
        if not self._free:
            raise RuntimeError(f"more than {len(self.num_tokens)} sequences were scheduled")
        row = self._row_of[sequence.request_id] = self._free.pop()
        self.num_tokens[row] = len(sequence.token_ids)
        self.token_ids[row, : len(sequence.token_ids)] = sequence.token_ids
        self._num_blocks[:, row] = 0
        self._is_last_unknown[row] = False
        self.append_blocks(sequence.request_id, sequence.block_ids)

    def append_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Extends the block tables, one list of ids per group."""
        row = self._row_of[request_id]
        for group_id, ids in enumerate(block_ids):
            if ids:
                begin = self._num_blocks[group_id, row]
                self._tables[group_id, row, begin : begin + len(ids)] = ids
                self._num_blocks[group_id, row] = begin + len(ids)

    def append_token(self, row: int, token_id: int) -> None:
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def append_unknown_tokens(self, rows: Ints) -> None:
        """Sequences have got a token that the device alone knows: each is the row's last one."""
        self.num_tokens[rows] += 1
        self._is_last_unknown[rows] = True

    def unknown_tokens(self, arrays: StepArrays) -> npt.NDArray[np.int32]:
        """For each token of a step, the row whose unknown last token it is, or -1."""
        rows = arrays.row_of_token
        is_unknown = self._is_last_unknown[rows]
        is_unknown &= arrays.positions == self.num_tokens[rows] - 1
        return np.where(is_unknown, rows, -1).astype(np.int32)

    def arrange(self, plan: StepPlan) -> StepArrays:
        """The input of a plan that is not empty and whose changes are applied."""
        rows = np.array([self._row_of[request_id] for request_id in plan.request_ids], np.int64)
        num_computed = np.array(plan.num_computed_tokens, np.int64)
        num_scheduled = np.array(plan.num_scheduled_tokens, np.int64)
        seq_lens = num_computed + num_scheduled
        cu_seqlens = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(num_scheduled, out=cu_seqlens[1:])

        seq_of_token = np.repeat(np.arange(len(rows)), num_scheduled)
        positions = np.arange(cu_seqlens[-1]) + (num_computed - cu_seqlens[:-1])[seq_of_token]
        row_of_token = rows[seq_of_token]
        token_ids = self.token_ids[row_of_token, positions].astype(np.int64)

        max_seq_len = int(seq_lens.max())
        max_blocks = -(-max_seq_len // self._block_size)
        tables = np.ascontiguousarray(self._tables[:, rows, :max_blocks])
        block_ids = tables[:, seq_of_token, positions // self._block_size].astype(np.int64)
        # Indexing leaves the groups innermost; kernels read a group's slots as one run.
        slots = np.ascontiguousarray(block_ids * self._block_size + positions % self._block_size)
        return StepArrays(
            token_ids,
            positions,
            slots,
            tables,
            seq_lens,
            cu_seqlens,
            rows,
            row_of_token,
            int(num_scheduled.max()),
            max_seq_len,
        )

    def build(self, plan: StepPlan) -> StepBatch:
        """The forward pass of such a plan, in the CPU's memory; valid until the next call."""
        rows = [self._row_of[request_id] for request_id in plan.request_ids]
        shape = self._shape(plan)
        if self._buffers.shape != shape:
            self._buffers = StepBuffers(shape, len(self._tables))
            self._gather = step_gather(
                self.token_ids, self._tables, self._block_size, self._buffers.arrays
            )
        self._gather(rows, plan.num_computed_tokens, plan.num_scheduled_tokens)
        return StepBatch(self._buffers.forward, rows, self._buffers.arrays.cu_seqlens)

    def _shape(self, plan: StepPlan) -> StepShape:
        num_scheduled = plan.num_scheduled_tokens
        max_seq_len = max(map(operator.add, plan.num_computed_tokens, num_scheduled))
        # Tables are wider than needed, so that the next steps have the same shape.
        width = -(-max_seq_len // (self._block_size * _BLOCKS_AT_ONCE)) * _BLOCKS_AT_ONCE
        num_blocks = min(width, self._tables.shape[2])
        return StepShape(
            sum(num_scheduled),
            len(num_scheduled),
            num_blocks,
            max(num_scheduled),
            min(num_blocks * self._block_size, self.token_ids.shape[1] - 1),
        )
