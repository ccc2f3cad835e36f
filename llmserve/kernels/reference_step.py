"""Gathers a step's arrays with numpy: what runs without the compiled extension, and is tested
against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Takes three numbers for each sequence of a step: its row, and how many tokens are computed and how
# many are scheduled. It has tokens [num_computed, num_computed + num_scheduled) of the row.
GatherStep = Callable[[Sequence[int], Sequence[int], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class GatheredArrays:
    """What a step's kernels read, all contiguous; meanings as in StepInputs."""

    token_ids: npt.NDArray[np.int64]  # [num_tokens]
    positions: npt.NDArray[np.int64]  # [num_tokens]
    slots: npt.NDArray[np.int64]  # [num_groups, num_tokens]
    tables: npt.NDArray[np.int32]  # [num_groups, num_seqs, table_width]
    seq_lens: npt.NDArray[np.int32]  # [num_seqs]
    cu_seqlens: npt.NDArray[np.int32]  # [num_seqs + 1]


def step_gather(
    token_rows: npt.NDArray[np.int32],
    table_rows: npt.NDArray[np.int32],
    block_size: int,
    out: GatheredArrays,
) -> GatherStep:
    """What fills `out` from rows of tokens and of block tables, for steps of one shape.

    token_rows: [num_rows, max_tokens]; table_rows: [num_groups, num_rows, max_blocks].
    """

    def gather(
        row_ids: Sequence[int], num_computed: Sequence[int], num_scheduled: Sequence[int]
    ) -> None:
        begin = 0
        for i, (row, first, count) in enumerate(
            zip(row_ids, num_computed, num_scheduled, strict=True)
        ):
            tokens = slice(begin, begin + count)
            positions = np.arange(first, first + count)
            tables = table_rows[:, row].astype(np.int64)
            num_blocks = -(-(first + count) // block_size)
            out.positions[tokens] = positions
            out.token_ids[tokens] = token_rows[row, positions]
            out.slots[:, tokens] = (
                tables[:, positions // block_size] * block_size + positions % block_size
            )
            out.tables[:, i, :num_blocks] = tables[:, :num_blocks]
            out.seq_lens[i] = first + count
            begin += count
            out.cu_seqlens[i + 1] = begin

    return gather
