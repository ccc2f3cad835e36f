"""Sampling on the device against the rules in float64, row by row, and against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.kernels import (
    SAMPLING_ROW,
    STATUS_INVALID,
    STATUS_OK,
    reference_sampling,
    sample_rows,
)
from llmserve.kernels.cuda import sampling
from llmserve.kernels.reference_sampling import STATUS_EMPTY, uniform_at

SEGMENT = 4096  # logits of a row that one block works on
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 10},
    {"top_k": 600},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.05},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.02},
]


class Device:
    """sample_rows and logprob_rows over numpy arrays.

    Calls of fewer rows of a vocabulary use the workspace of earlier ones again.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._workspaces: dict[int, torch.Tensor] = {}
        self._capacities: dict[int, int] = {}  # rows of the workspaces

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Rows of parameters become rows of bytes."""
        if array.dtype.names is not None:
            array = array.view(np.uint8).reshape(len(array), -1)
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def sample(
        self,
        logits: np.ndarray | torch.Tensor,
        params: np.ndarray,
        masks: Sequence[np.ndarray | None] | None = None,
        *,
        stages: int | None = None,
    ) -> np.ndarray:
        if isinstance(logits, np.ndarray):
            logits = self.upload(logits)
        num_rows, vocab_size = logits.shape
        if num_rows > self._capacities.get(vocab_size, 0):
            self._capacities[vocab_size] = num_rows
            self._workspaces[vocab_size] = sampling.sampling_workspace(
                self.module, num_rows, vocab_size, self.device
            )
        sampled = sampling.sample_rows(
            self.module,
            logits,
            self.upload(params),
            self._workspaces[vocab_size],
            stages=sampling.stages_of(self.module, params) if stages is None else stages,
            masks=None if masks is None else self._upload_masks(masks, vocab_size),
        )
        return sampling.sampled_rows(sampled.cpu())

    def _upload_masks(self, masks: Sequence[np.ndarray | None], vocab_size: int) -> sampling.Masks:
        present = [mask for mask in masks if mask is not None]
        ids = np.full(len(masks), -1, np.int32)
        ids[[i for i, mask in enumerate(masks) if mask is not None]] = range(len(present))
        words = sampling.pack_masks(present, vocab_size)
        return sampling.Masks(self.upload(words), self.upload(ids))

    def logprobs(
        self, logits: np.ndarray, token_ids: np.ndarray, top_k: int, **others: Any
    ) -> reference_sampling.RowLogprobs:
        num_rows, vocab_size = logits.shape
        result = sampling.logprob_rows(
            self.module,
            self.upload(logits),
            self.upload(token_ids.astype(np.int32)),
            top_k,
            sampling.logprob_workspace(self.module, num_rows, vocab_size, top_k, self.device),
            **{name: self.upload(array) for name, array in others.items()},
        )
        return reference_sampling.RowLogprobs(*(x.cpu().numpy() for x in result))


@pytest.fixture
def on_device(cuda_module: Any, device: torch.device) -> Device:
    return Device(cuda_module, device)


def make_params(num_rows: int, **values: Any) -> np.ndarray:
    params = np.zeros(num_rows, SAMPLING_ROW)
    params["temperature"], params["top_p"] = 1.0, 1.0
    params["seed"] = np.arange(num_rows) * 7919
    for name, value in values.items():
        params[name] = value
    return params


def make_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


def kept_by(row: np.ndarray, sampled: Any) -> np.ndarray:
    """Which tokens a result says that the filters kept."""
    is_tie_kept = (row == sampled["threshold"]) & (np.arange(len(row)) <= sampled["last_tie_id"])
    return (row > sampled["threshold"]) | is_tie_kept


def kept_by_rules(row: np.ndarray, params: Any, slack: float) -> np.ndarray:
    """The same by the rules' own words; slack > 0 keeps tokens near a limit, < 0 drops them."""
    scaled = row.astype(np.float64) / params["temperature"]
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled.max())
    order = order[weights >= params["min_p"] * (1 - slack)]
    top_k = int(params["top_k"])
    if 0 < top_k < len(order):
        order = order[scaled[order] >= scaled[order[top_k - 1]]]
    if params["top_p"] < 1:
        weights = np.exp(scaled[order] - scaled.max())
        before = (np.cumsum(weights) - weights) / weights.sum()
        order = order[(before < params["top_p"] + slack) | (np.arange(len(order)) == 0)]
    kept = np.zeros(len(row), np.bool_)
    kept[order] = True
    return kept


def assert_follows_the_rules(
    logits: np.ndarray, params: np.ndarray, sampled: np.ndarray, slack: float = 1e-6
) -> None:
    """Every token is the one that the random number picks of the kept ones, up to rounding."""
    assert (sampled["status"] == STATUS_OK).all()
    for row, row_params, result in zip(logits, params, sampled, strict=True):
        token_id = int(result["token_id"])
        if row_params["temperature"] == 0:
            assert token_id == row.argmax() == result["last_tie_id"]
            assert result["threshold"] == row[token_id]
            continue
        kept = kept_by(row, result)
        assert kept[token_id]
        assert not (kept_by_rules(row, row_params, -slack) & ~kept).any()
        assert not (kept & ~kept_by_rules(row, row_params, slack)).any()
        weights = np.exp((row - row.max()).astype(np.float64) / row_params["temperature"]) * kept
        sums = np.cumsum(weights) / weights.sum()
        target = uniform_at(int(row_params["seed"]), int(row_params["counter"]))
        before = sums[token_id - 1] if token_id else 0.0
        assert before - slack <= target <= sums[token_id] + slack


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000, SEGMENT + 907])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_follow_the_rules(
    on_device: Device, filters: dict[str, Any], vocab_size: int
) -> None:
    logits = make_logits(4, vocab_size, seed=vocab_size)
    params = make_params(4, temperature=[0.3, 1.0, 1.7, 0.0], counter=[0, 1, 2**40, 3], **filters)

    sampled = on_device.sample(logits, params)

    assert_follows_the_rules(logits, params, sampled)


def test_thousands_of_tokens_are_those_of_the_cpu(on_device: Device) -> None:
    rng = np.random.default_rng(3)
    num_rows = 2000
    logits = rng.normal(0, 3, (num_rows, 150)).astype(np.float32)
    is_coarse = rng.random(num_rows) < 0.5  # full of equal logits
    logits[is_coarse] = np.round(logits[is_coarse])
    params = make_params(
        num_rows,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5], num_rows),
        top_k=rng.choice([0, 0, 1, 5, 40, 149, 150, 1000], num_rows),
        top_p=rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.99], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2], num_rows),
        seed=rng.integers(0, 2**63, num_rows),
        counter=rng.integers(0, 10_000, num_rows),
    )

    sampled = on_device.sample(logits, params)

    assert_follows_the_rules(logits, params, sampled)
    is_greedy = params["temperature"] == 0
    for sample in (sample_rows, reference_sampling.sample_rows):
        expected = sample(torch.from_numpy(logits), params)
        for name in ("threshold", "last_tie_id", "token_id"):
            assert (sampled[name] == expected[name])[is_greedy].all()
        # A difference is a random number or a limit within rounding of a token's edge.
        assert np.count_nonzero(sampled["token_id"] != expected["token_id"]) <= 2
        assert np.count_nonzero(sampled["last_tie_id"] != expected["last_tie_id"]) <= 30


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_top_p_finds_the_nucleus_of_a_long_tailed_row(on_device: Device, top_p: float) -> None:
    ranked = -1.5 * np.log(np.arange(1, 5 * SEGMENT - 480))
    logits = np.random.default_rng(2).permutation(ranked).astype(np.float32)[None]
    params = make_params(1, top_p=top_p)

    assert_follows_the_rules(logits, params, on_device.sample(logits, params), slack=1e-7)


@pytest.mark.parametrize("share", [0.001, 0.4551, 0.4553, 0.9999])
def test_top_p_keeps_equal_logits_with_lower_ids_in_all_segments(
    on_device: Device, share: float
) -> None:
    vocab_size = 9000  # 0.4551 of it ends in the first segment, 0.4553 in the second
    logits = np.zeros((1, vocab_size), np.float32)

    sampled = on_device.sample(logits, make_params(1, top_p=share))[0]

    assert sampled["last_tie_id"] == np.ceil(vocab_size * share) - 1
    assert sampled["threshold"] == 0


def test_top_k_keeps_all_that_equal_the_kth(on_device: Device) -> None:
    logits = np.array([[3, 2, 1, 2, 2, 0]], np.float32)

    sampled = on_device.sample(logits, make_params(1, top_k=2))[0]

    assert kept_by(logits[0], sampled).tolist() == [True, True, False, True, True, False]


def test_top_k_of_fewer_finite_logits_keeps_them(on_device: Device) -> None:
    logits = np.full((1, 50), -np.inf, np.float32)
    logits[0, [7, 9]] = 1.0
    params = make_params(1, top_k=3, top_p=0.9)

    for seed in range(5):
        params["seed"] = seed
        sampled = on_device.sample(logits, params)[0]
        assert sampled["token_id"] in (7, 9)
        assert kept_by(logits[0], sampled).nonzero()[0].tolist() == [7, 9]


def test_greedy_takes_the_lowest_id_of_the_best(on_device: Device) -> None:
    for vocab_size in (5, 64, 3 * SEGMENT + 1):
        logits = make_logits(2, vocab_size)
        best = logits.max() + 1
        logits[0, [2, 3, vocab_size - 1]] = best
        logits[1, vocab_size - 1] = best

        sampled = on_device.sample(logits, make_params(2, temperature=0.0))

        assert sampled["token_id"].tolist() == [2, vocab_size - 1]


def test_minus_zero_equals_zero(on_device: Device) -> None:
    logits = np.array([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]], np.float32)

    greedy = on_device.sample(logits, make_params(2, temperature=0.0))
    kept = on_device.sample(logits, make_params(2, top_k=1))

    assert greedy["token_id"].tolist() == [0, 0]
    for row, result in zip(logits, kept, strict=True):
        assert kept_by(row, result).tolist() == [True, True, False]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_rows_that_cannot_be_sampled_say_why(on_device: Device, filters: dict[str, Any]) -> None:
    logits = make_logits(5, SEGMENT + 10)
    logits[0, SEGMENT + 5] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[3, :-1] = -np.inf

    sampled = on_device.sample(logits, make_params(5, **filters))

    expected = [STATUS_INVALID, STATUS_INVALID, STATUS_EMPTY, STATUS_OK, STATUS_OK]
    assert sampled["status"].tolist() == expected
    assert sampled["token_id"][3] == SEGMENT + 9


def test_a_row_has_the_same_bits_alone_and_among_others(on_device: Device) -> None:
    logits = make_logits(6, SEGMENT + 77)
    params = make_params(6, top_p=0.8, top_k=[0, 3, 0, 500, 1, 0], temperature=[1, 2, 0, 1, 1, 1])

    together = on_device.sample(logits, params)

    for i in range(6):
        alone = on_device.sample(logits[i : i + 1], params[i : i + 1])
        assert alone[0] == together[i]


@pytest.mark.parametrize("offset", [0, 1])
def test_rows_may_be_strided_and_unaligned(on_device: Device, offset: int) -> None:
    vocab_size = 1001
    logits = make_logits(3, vocab_size)
    wide = torch.empty(3, vocab_size + 5, device=on_device.device)
    view = wide[:, offset : offset + vocab_size]
    view.copy_(torch.from_numpy(logits))
    params = make_params(3, top_p=0.9)

    assert (on_device.sample(view, params) == on_device.sample(logits, params)).all()


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.3}], ids=str
)
@pytest.mark.parametrize("num_bytes", [640, 626, 100])
def test_masks_forbid_tokens_without_changing_logits(
    on_device: Device, num_bytes: int, filters: dict[str, Any]
) -> None:
    vocab_size = SEGMENT + 1000
    rng = np.random.default_rng(5)
    logits = make_logits(4, vocab_size)
    masks = [None, *(rng.integers(0, 256, num_bytes, np.uint8) for _ in range(3))]
    masks[3][1:] = 0  # hardly any token
    masks[3][0] = 0b10010
    logits[3, 500] = np.nan  # which the mask forbids
    params = make_params(4, **filters)
    expected = reference_sampling.sample_rows(torch.from_numpy(logits.copy()), params, masks)
    there = on_device.upload(logits)

    sampled = on_device.sample(there, params, masks)

    assert sampled["token_id"].tolist() == expected["token_id"].tolist()
    assert sampled["status"].tolist() == [STATUS_OK] * 4
    np.testing.assert_array_equal(there.cpu().numpy(), logits)


def test_a_mask_that_allows_nothing_leaves_no_token(on_device: Device) -> None:
    logits = make_logits(2, 100)
    masks = [np.zeros(13, np.uint8), np.zeros(0, np.uint8)]

    sampled = on_device.sample(logits, make_params(2), masks)

    assert sampled["status"].tolist() == [STATUS_EMPTY, STATUS_EMPTY]


def test_stages_that_rows_do_not_need_may_be_left_out(on_device: Device) -> None:
    module = on_device.module
    everything = module.draw_stage | module.top_k_stage | module.top_p_stage
    logits = make_logits(4, 300)
    params = make_params(4, temperature=[0, 1, 1, 1], top_k=[0, 0, 7, 0], top_p=[1, 1, 1, 0.5])

    assert sampling.stages_of(module, params[:1]) == 0
    assert sampling.stages_of(module, params[:2]) == module.draw_stage
    assert sampling.stages_of(module, params) == everything
    for i in range(4):
        row, row_params = logits[i : i + 1], params[i : i + 1]
        few = on_device.sample(row, row_params)
        assert few == on_device.sample(row, row_params, stages=everything)


def test_a_tiny_temperature_takes_the_best(on_device: Device) -> None:
    logits = make_logits(2, 100)
    params = make_params(2, temperature=[1e-6, 1e-320])

    sampled = on_device.sample(logits, params)

    assert sampled["token_id"].tolist() == logits.argmax(1).tolist()


def test_tokens_are_stored_for_the_next_step(cuda_module: Any, on_device: Device) -> None:
    logits = make_logits(4, 50)
    logits[2] = np.nan
    last_tokens = torch.full((6,), -5, dtype=torch.int32, device=on_device.device)
    targets = on_device.upload(np.array([4, -1, 0, 1], np.int32))
    params = on_device.upload(make_params(4, temperature=0.0))
    workspace = sampling.sampling_workspace(cuda_module, 4, 50, on_device.device)
    sampled = sampling.sample_rows(cuda_module, on_device.upload(logits), params, workspace)

    sampling.store_tokens(cuda_module, sampled, targets, last_tokens)

    best = logits.argmax(1).tolist()
    assert last_tokens.tolist() == [-5, best[3], -5, -5, best[0], -5]


@pytest.mark.parametrize("vocab_size", [1, 37, SEGMENT, 2 * SEGMENT + 300])
@pytest.mark.parametrize("top_k", [0, 1, 20, 150])
def test_logprobs_ranks_and_best_tokens(on_device: Device, top_k: int, vocab_size: int) -> None:
    logits = make_logits(4, vocab_size, seed=top_k)
    logits[1] = np.round(logits[1])
    logits[2, ::2] = -np.inf
    logits[2, vocab_size // 2] = 0
    rng = np.random.default_rng(1)
    token_ids = rng.integers(0, vocab_size, 4).astype(np.int32)
    rows = torch.from_numpy(logits)
    expected = reference_sampling.logprob_rows(rows, np.arange(4), token_ids, top_k)

    actual = on_device.logprobs(logits, token_ids, top_k)

    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(actual.ranks, expected.ranks)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    np.testing.assert_allclose(actual.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-6)


def test_logprobs_of_chosen_rows_at_sampled_tokens(cuda_module: Any, on_device: Device) -> None:
    logits = make_logits(5, 200)
    params = on_device.upload(make_params(5))
    there = on_device.upload(logits)
    workspace = sampling.sampling_workspace(cuda_module, 5, 200, on_device.device)
    sampled = sampling.sample_rows(cuda_module, there, params, workspace)
    rows = np.array([4, 1], np.int32)

    actual = sampling.logprob_rows(
        cuda_module,
        there,
        sampling.sampled_token_ids(sampled),
        3,
        sampling.logprob_workspace(cuda_module, 2, 200, 3, on_device.device),
        row_ids=on_device.upload(rows),
        token_rows=on_device.upload(rows),
    )

    token_ids = sampling.sampled_rows(sampled.cpu())["token_id"][rows]
    expected = reference_sampling.logprob_rows(torch.from_numpy(logits), rows, token_ids, 3)
    np.testing.assert_allclose(actual.logprobs.cpu(), expected.logprobs, rtol=1e-6)
    np.testing.assert_array_equal(actual.ranks.cpu(), expected.ranks)
    np.testing.assert_array_equal(actual.top_ids.cpu(), expected.top_ids)


@pytest.mark.parametrize("top_k", [0, 3, 140])
def test_logprobs_of_invalid_rows_are_nan(on_device: Device, top_k: int) -> None:
    logits = make_logits(5, 2 * SEGMENT)
    logits[0, 5], logits[1, SEGMENT], logits[2] = np.nan, np.inf, -np.inf

    actual = on_device.logprobs(logits, np.array([3, 4, 5, 2 * SEGMENT, 6]), top_k)

    assert np.isnan(actual.logprobs).tolist() == [True, True, True, True, False]
    assert actual.ranks[:3].tolist() == [4, 5, 6]
    for i in range(3):
        assert actual.top_ids[i].tolist() == list(range(top_k))
        assert np.isnan(actual.top_logprobs[i]).all()
    assert np.isfinite(actual.top_logprobs[4]).all()


def test_wrong_tensors_are_refused_before_the_kernel(
    cuda_module: Any, on_device: Device, device: torch.device
) -> None:
    logits, params = make_logits(2, 10), make_params(2)
    workspace = sampling.sampling_workspace(cuda_module, 1, 10, device)
    there = on_device.upload(params)

    with pytest.raises(ValueError, match=r"the workspace has \d+ bytes; these rows need \d+"):
        sampling.sample_rows(cuda_module, on_device.upload(logits), there, workspace)
    with pytest.raises(ValueError, match="params must be contiguous"):
        sampling.sample_rows(cuda_module, on_device.upload(logits), there[:1], workspace)
    with pytest.raises(ValueError, match="logits must be float32"):
        on_device.sample(np.zeros((2, 3)), params)
    with pytest.raises(ValueError, match="token_ids must be int32"):
        on_device.logprobs(logits, np.zeros(3), 1)
