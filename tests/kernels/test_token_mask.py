"""Rows sampled under masks of tokens, compiled and in numpy, against rows masked beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.kernels import HAS_EXT, SAMPLING_ROW, STATUS_INVALID, reference_sampling

if HAS_EXT:
    from llmserve.kernels import sampling

Sample = Callable[..., np.ndarray]
BACKENDS: dict[str, Sample] = {"reference": reference_sampling.sample_rows}
if HAS_EXT:
    BACKENDS["compiled"] = sampling.sample_rows
needs_ext = pytest.mark.skipif(not HAS_EXT, reason="needs the compiled kernels")

VOCAB_SIZES = [1, 7, 8, 63, 64, 65, 128, 300, 1000, 5003]
SHARES = [0.0, 0.002, 0.3, 0.998, 1.0]
FILTERS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_k": 400},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 50, "top_p": 0.95},
]


@pytest.fixture(params=BACKENDS)
def sample(request: pytest.FixtureRequest) -> Sample:
    return BACKENDS[request.param]


def make_params(num_rows: int, **values: float) -> np.ndarray:
    params = np.zeros(num_rows, SAMPLING_ROW)
    params["top_p"] = 1.0
    params["seed"] = np.arange(num_rows)
    for name, value in values.items():
        params[name] = value
    return params


def make_logits(num_rows: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(7).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


def make_mask(num_bytes: int, share: float, seed: int = 0) -> np.ndarray:
    allowed = np.random.default_rng(seed).random(num_bytes * 8) < share
    return np.packbits(allowed, bitorder="little")


def masked(logits: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    rows = []
    for row, mask in zip(logits.tolist(), masks, strict=True):
        bits = [byte >> i & 1 for byte in mask.tolist() for i in range(8)]
        bits += [0] * len(row)
        rows.append([x if bit else -np.inf for x, bit in zip(row, bits, strict=False)])
    return np.array(rows, np.float32)


def assert_equal_to_masked_rows(
    sample: Sample, logits: np.ndarray, masks: list[np.ndarray], params: np.ndarray
) -> np.ndarray:
    expected = sample(torch.from_numpy(masked(logits, masks)), params)
    result = sample(torch.from_numpy(logits), params, masks)
    assert np.array_equal(result, expected)
    return result


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_rows_are_sampled_as_if_masked_before(
    sample: Sample, share: float, filters: dict[str, float]
) -> None:
    for vocab_size in VOCAB_SIZES:
        logits = make_logits(6, vocab_size)
        num_bytes = -(-vocab_size // 32) * 4
        masks = [make_mask(num_bytes, share, seed) for seed in range(6)]

        assert_equal_to_masked_rows(sample, logits, masks, make_params(6, **filters))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_runs_that_are_allowed_or_forbidden_as_a_whole_meet_mixed_ones(
    sample: Sample, filters: dict[str, float]
) -> None:
    runs = [b"\xff" * 8, bytes(8), b"\x01" + bytes(7), bytes(7) + b"\x80", b"\xfe" + b"\xff" * 7]
    mask = np.frombuffer(b"".join(runs * 2), np.uint8)

    assert_equal_to_masked_rows(sample, make_logits(3, 640), [mask] * 3, make_params(3, **filters))


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 36, 40, 200])
def test_masks_may_be_shorter_or_longer_than_the_vocabulary(sample: Sample, num_bytes: int) -> None:
    masks = [make_mask(num_bytes, 1.0)]

    assert_equal_to_masked_rows(sample, make_logits(1, 300), masks, make_params(1, temperature=1.0))


def test_forbidden_tokens_are_never_drawn(sample: Sample) -> None:
    """They are the best by far, and alone in their runs of 64."""
    logits = np.zeros((64, 1000), np.float32)
    logits[:, 128:640] = 50.0
    mask = np.zeros(125, np.uint8)
    mask[:3] = 0xFF

    result = sample(torch.from_numpy(logits), make_params(64, temperature=2.0), [mask] * 64)

    assert (result["token_id"] < 24).all()
    assert len(set(result["token_id"].tolist())) > 8


def test_rows_without_a_mask_are_not_changed(sample: Sample) -> None:
    logits = make_logits(3, 700)
    before = logits.copy()
    params = make_params(3, temperature=1.0)

    result = sample(torch.from_numpy(logits), params, [None, make_mask(88, 0.3), None])

    assert np.array_equal(logits[[0, 2]], before[[0, 2]])
    expected = sample(torch.from_numpy(before), params)
    assert np.array_equal(result[[0, 2]], expected[[0, 2]])


def test_nan_counts_where_it_is_allowed(sample: Sample) -> None:
    logits = make_logits(2, 300)
    logits[:, 70] = np.nan
    masks = [make_mask(40, 1.0), make_mask(40, 1.0)]
    masks[1][70 // 8] &= ~(1 << 70 % 8) & 0xFF

    result = sample(torch.from_numpy(logits), make_params(2), masks)

    assert result["status"].tolist() == [STATUS_INVALID, 0]


@needs_ext
@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([None], "2 rows need as many masks, not 1"),
        ([None, np.zeros(5, np.int8)], "uint8"),
        ([np.zeros(10, np.uint8)[::2], None], "strides"),
        ([np.zeros((5, 1), np.uint8), None], "shape"),
    ],
)
def test_wrong_masks_are_refused(masks: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling.sample_rows(torch.zeros(2, 40), make_params(2), masks)
