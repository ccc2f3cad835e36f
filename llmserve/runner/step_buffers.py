"""The tensors of a step's forward pass, in the CPU's memory, used again by steps of the same shape.

Decode steps have one shape for as long as the same number of sequences runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from llmserve.kernels import GatheredArrays
from llmserve.layers import AttentionInputs
from llmserve.models import ForwardBatch


class StepShape(NamedTuple):
    """Steps of equal shapes may share their tensors."""

    num_tokens: int
    num_seqs: int
    num_blocks: int  # of a block table
    max_query_len: int
    max_seq_len: int  # no context is longer; may be more than the longest


class StepBuffers:
    """Arrays for steps of one shape, and the same memory as tensors."""

    def __init__(self, shape: StepShape, num_groups: int) -> None:
        self.shape = shape
        num_tokens, num_seqs, num_blocks = shape.num_tokens, shape.num_seqs, shape.num_blocks
        self.arrays = GatheredArrays(
            np.zeros(num_tokens, np.int64),
            np.zeros(num_tokens, np.int64),
            np.zeros((num_groups, num_tokens), np.int64),
            np.zeros((num_groups, num_seqs, num_blocks), np.int32),
            np.zeros(num_seqs, np.int32),
            np.zeros(num_seqs + 1, np.int32),
        )
        self.forward = self._as_tensors()

    def _as_tensors(self) -> ForwardBatch:
        arrays = self.arrays
        positions, seq_lens, cu_seqlens = map(
            torch.from_numpy, (arrays.positions, arrays.seq_lens, arrays.cu_seqlens)
        )
        slots = torch.from_numpy(arrays.slots).unbind()
        tables = torch.from_numpy(arrays.tables).unbind()
        groups = tuple(
            AttentionInputs(
                positions,
                group_slots,
                group_tables,
                seq_lens,
                cu_seqlens,
                self.shape.max_query_len,
                self.shape.max_seq_len,
            )
            for group_slots, group_tables in zip(slots, tables, strict=True)
        )
        return ForwardBatch(torch.from_numpy(arrays.token_ids), groups, self.shape.max_seq_len)
