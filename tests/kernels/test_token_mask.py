"""Token masks applied to rows of logits, compiled and in numpy, against plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.kernels import HAS_EXT, reference_sampling

if HAS_EXT:
    from llmserve.kernels import sampling

Apply = Callable[[torch.Tensor, Sequence[int], Sequence[np.ndarray]], None]
BACKENDS: dict[str, Apply] = {"reference": reference_sampling.apply_token_masks}
if HAS_EXT:
    BACKENDS["compiled"] = sampling.apply_token_masks
needs_ext = pytest.mark.skipif(not HAS_EXT, reason="needs the compiled kernels")

VOCAB_SIZES = [1, 7, 8, 63, 64, 65, 128, 300, 1000, 5003]
SHARES = [0.0, 0.002, 0.3, 0.998, 1.0]


@pytest.fixture(params=BACKENDS)
def apply(request: pytest.FixtureRequest) -> Apply:
    return BACKENDS[request.param]


def make_logits(num_rows: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(7).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


def make_mask(num_bytes: int, share: float, seed: int = 0) -> np.ndarray:
    allowed = np.random.default_rng(seed).random(num_bytes * 8) < share
    return np.packbits(allowed, bitorder="little")


def masked(row: np.ndarray, mask: np.ndarray) -> list[float]:
    bits = [byte >> i & 1 for byte in mask.tolist() for i in range(8)]
    bits += [0] * len(row)
    return [x if bit else -np.inf for x, bit in zip(row.tolist(), bits, strict=False)]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("share", SHARES)
def test_tokens_that_are_not_allowed_become_impossible(
    apply: Apply, vocab_size: int, share: float
) -> None:
    logits = make_logits(1, vocab_size)
    mask = make_mask(-(-vocab_size // 32) * 4, share)
    expected = masked(logits[0], mask)

    apply(torch.from_numpy(logits), [0], [mask])

    assert logits[0].tolist() == expected


def test_runs_that_are_allowed_or_forbidden_as_a_whole_meet_mixed_ones(apply: Apply) -> None:
    logits = make_logits(1, 640)
    runs = [b"\xff" * 8, bytes(8), b"\x01" + bytes(7), bytes(7) + b"\x80", b"\xfe" + b"\xff" * 7]
    mask = np.frombuffer(b"".join(runs * 2), np.uint8)
    expected = masked(logits[0], mask)

    apply(torch.from_numpy(logits), [0], [mask])

    assert logits[0].tolist() == expected


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 36, 40, 200])
def test_masks_may_be_shorter_or_longer_than_the_vocabulary(apply: Apply, num_bytes: int) -> None:
    logits = make_logits(1, 300)
    mask = make_mask(num_bytes, 1.0)
    expected = masked(logits[0], mask)

    apply(torch.from_numpy(logits), [0], [mask])

    assert logits[0].tolist() == expected


def test_masks_change_their_own_rows_alone(apply: Apply) -> None:
    """Rows are a view with space between them, which is not touched."""
    whole = make_logits(12, 1024)
    before = whole.copy()
    row_ids = [10, 0, 3, 7, 8]
    masks = [make_mask(size, 0.5, seed) for seed, size in enumerate([128, 124, 100, 128, 4])]

    apply(torch.from_numpy(whole)[:, :1003], row_ids, masks)

    for row_id, mask in zip(row_ids, masks, strict=True):
        before[row_id, :1003] = masked(before[row_id, :1003], mask)
    assert np.array_equal(whole, before)


def test_forbidden_nan_is_gone_and_allowed_nan_stays(apply: Apply) -> None:
    logits = np.full((2, 70), np.nan, np.float32)

    apply(torch.from_numpy(logits), [1], [np.array([0b101, *[0] * 8], np.uint8)])

    assert np.flatnonzero(np.isnan(logits[1])).tolist() == [0, 2]
    assert np.isnan(logits[0]).all()


def test_no_masks_change_nothing(apply: Apply) -> None:
    logits = make_logits(2, 40)
    before = logits.copy()

    apply(torch.from_numpy(logits), [], [])

    assert np.array_equal(logits, before)


@needs_ext
@pytest.mark.parametrize(
    ("row_ids", "masks", "error", "message"),
    [
        ([0], [], ValueError, "distinct rows"),
        ([1, 1], [np.zeros(5, np.uint8)] * 2, ValueError, "distinct rows"),
        ([2], [np.zeros(5, np.uint8)], IndexError, r"\[0, 2\)"),
        ([-1], [np.zeros(5, np.uint8)], IndexError, r"\[0, 2\)"),
        ([0], [np.zeros(5, np.int8)], ValueError, "uint8"),
        ([0], [np.zeros(10, np.uint8)[::2]], ValueError, "strides"),
        ([0], [np.zeros((5, 1), np.uint8)], ValueError, "shape"),
    ],
)
def test_wrong_rows_and_masks_are_refused(
    row_ids: list[int], masks: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sampling.apply_token_masks(torch.zeros(2, 40), row_ids, masks)


@needs_ext
@pytest.mark.parametrize("logits", [torch.zeros(2, 40).double(), torch.zeros(40, 2).T])
def test_wrong_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="float32"):
        sampling.apply_token_masks(logits, [0], [np.zeros(5, np.uint8)])
