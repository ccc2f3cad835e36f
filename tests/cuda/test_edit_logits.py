"""Edits of logits on the device against the same edits on the CPU, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.kernels.cuda import sampling
from llmserve.kernels.row_edit import RowEdit, edit_row

VOCAB_SIZE = 5003


def make_logits(num_rows: int) -> np.ndarray:
    rng = np.random.default_rng(num_rows)
    return rng.normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32)


def ids_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Distinct ids, some of them outside the vocabulary."""
    return rng.permutation(VOCAB_SIZE + 40)[:count].astype(np.int64)


def edit(
    module: Any, device: torch.device, logits: np.ndarray, edits: Sequence[RowEdit], offset: int = 0
) -> np.ndarray:
    """Logits after the edits; `offset` elements unaligned."""
    wide = torch.empty(len(logits), VOCAB_SIZE + 8, device=device)
    view = wide[:, offset : offset + VOCAB_SIZE]
    view.copy_(torch.from_numpy(logits))
    packed = sampling.pack_edits(edits, VOCAB_SIZE)
    rows = torch.from_numpy(packed.rows.view(np.uint8).reshape(len(edits), -1))
    sampling.edit_logits(
        module,
        view,
        *(torch.as_tensor(part).to(device) for part in (rows, *packed[1:])),
    )
    return view.cpu().numpy()


@pytest.mark.parametrize("offset", [0, 1])
def test_edits_are_those_of_the_cpu(cuda_module: Any, device: torch.device, offset: int) -> None:
    rng = np.random.default_rng(offset)
    logits = make_logits(9)
    shared = ids_of(rng, 50)  # ids that several kinds of edit meet
    edits = [
        RowEdit(0, allowed_ids=np.sort(ids_of(rng, 300))),
        RowEdit(1, banned_ids=ids_of(rng, 20)),
        RowEdit(2, bias_ids=ids_of(rng, 600), bias=rng.normal(size=600).astype(np.float32)),
        RowEdit(
            4,
            penalty_ids=ids_of(rng, 1000),
            penalty_counts=rng.integers(0, 4, 1000).astype(np.float32),
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=-0.4,
        ),
        RowEdit(5, forced_token_id=4321),
        RowEdit(
            7,
            allowed_ids=np.sort(ids_of(rng, 3000)),
            banned_ids=shared[:10],
            bias_ids=shared[5:30],
            bias=rng.normal(size=25).astype(np.float32),
            penalty_ids=shared[:40],
            penalty_counts=rng.integers(0, 3, 40).astype(np.float32),
            frequency_penalty=1.1,
        ),
        RowEdit(8, allowed_ids=np.zeros(0, np.int64), forced_token_id=0),
    ]
    expected = logits.copy()
    for one in edits:
        edit_row(expected[one.row], one)

    np.testing.assert_array_equal(edit(cuda_module, device, logits, edits, offset), expected)


def test_an_edit_of_nothing_changes_nothing(cuda_module: Any, device: torch.device) -> None:
    logits = make_logits(2)

    np.testing.assert_array_equal(edit(cuda_module, device, logits, [RowEdit(1)]), logits)


def test_ids_too_large_for_the_device_are_outside_its_vocabulary(
    cuda_module: Any, device: torch.device
) -> None:
    logits = make_logits(1)
    edits = [RowEdit(0, banned_ids=np.array([2**33 + 5, 5]))]
    expected = logits.copy()
    expected[0, 5] = -np.inf

    np.testing.assert_array_equal(edit(cuda_module, device, logits, edits), expected)
