"""What is done to one row of logits before it is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def _no_ids() -> Ids:
    return np.zeros(0, np.int64)


def _no_values() -> Floats:
    return np.zeros(0, np.float32)


@dataclass(slots=True)
class RowEdit:
    """Edits of row `row`, in the order of the fields. Ids beyond the vocabulary have no effect.

    No id occurs twice in a list; none is negative. `penalty_counts[i]` is how often penalty_ids[i]
    is in the output.
    """

    row: int
    allowed_ids: Ids | None = None  # all others become -inf
    banned_ids: Ids = field(default_factory=_no_ids)  # become -inf
    bias_ids: Ids = field(default_factory=_no_ids)
    bias: Floats = field(default_factory=_no_values)  # is added
    penalty_ids: Ids = field(default_factory=_no_ids)
    penalty_counts: Floats = field(default_factory=_no_values)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    forced_token_id: int | None = None  # gets 0, all others -inf


def edit_row(row: Floats, edit: RowEdit) -> None:
    """Applies an edit to logits [vocab_size], in vLLM's order.

    Repetition (Keskar et al., CTRL, 2019, arXiv 1909.05858) divides positive logits and multiplies
    negative ones; frequency is subtracted per occurrence in the output, presence once for a token
    that occurs there.
    """
    if edit.allowed_ids is not None:
        allowed = edit.allowed_ids[edit.allowed_ids < len(row)]
        logits = row[allowed]
        row.fill(-np.inf)
        row[allowed] = logits
    if len(edit.banned_ids):
        row[edit.banned_ids[edit.banned_ids < len(row)]] = -np.inf
    if len(edit.bias_ids):
        is_inside = edit.bias_ids < len(row)
        row[edit.bias_ids[is_inside]] += edit.bias[is_inside]
    if len(edit.penalty_ids):
        _penalize(row, edit)
    if edit.forced_token_id is not None:
        row.fill(-np.inf)
        row[edit.forced_token_id] = 0.0


def _penalize(row: Floats, edit: RowEdit) -> None:
    is_inside = edit.penalty_ids < len(row)
    ids, counts = edit.penalty_ids[is_inside], edit.penalty_counts[is_inside]
    logits = row[ids]
    if edit.repetition_penalty != 1.0:
        penalty = np.float32(edit.repetition_penalty)
        logits = np.where(logits > 0, logits / penalty, logits * penalty)
    logits -= np.float32(edit.frequency_penalty) * counts
    logits -= np.float32(edit.presence_penalty) * (counts > 0)
    row[ids] = logits
