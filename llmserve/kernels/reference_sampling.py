"""Sampling, log-probabilities and masks in numpy and float64: the readable twin of ext/cpu_kernels.

Same meaning and same sets of kept tokens as the C++ kernels, same generator; a draw may differ
where the running sum of weights, rounded differently, meets the random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# How a row is sampled; temperature 0 is greedy, the filters' off values are 1.0, 0.0 and 0. Laid
# out as SamplingRow in ext/include/llmserve/sampling.h.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("counter", np.uint64),
    ]
)

# What came of it. The filters kept the tokens with a logit above `threshold` and, of those equal
# to it, the ones with an id up to `last_tie_id`. The rest is valid where status is STATUS_OK.
SAMPLED_ROW = np.dtype(
    [
        ("threshold", np.float32),
        ("last_tie_id", np.int32),
        ("token_id", np.int32),
        ("status", np.uint8),
    ],
    align=True,
)
STATUS_OK = 0
STATUS_INVALID = 1  # a NaN or +inf among the logits
STATUS_EMPTY = 2  # every logit is -inf

NO_TIE_CUT = np.iinfo(np.int32).max

FloatRow = npt.NDArray[np.float32]


class RowLogprobs(NamedTuple):
    """log_softmax of rows at one token each and at their most likely tokens."""

    logprobs: npt.NDArray[np.float64]  # [num_rows]
    ranks: npt.NDArray[np.int32]  # [num_rows], 1 is the most likely token
    top_ids: npt.NDArray[np.int32]  # [num_rows, top_k], best first, ties by lower id
    top_logprobs: npt.NDArray[np.float64]  # [num_rows, top_k]


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox4x32: four 32-bit words from a counter of four and a key of two.

    Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & mask
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def uniform_at(seed: int, counter: int) -> float:
    """The counter-th number of a seed (both below 2^64), uniform in [0, 1) with 53 bits."""
    mask = 0xFFFFFFFF
    low, high, _, _ = philox4x32([counter & mask, counter >> 32, 0, 0], [seed & mask, seed >> 32])
    return float((high << 32 | low) >> 11) * 2.0**-53


def sample_rows(
    logits: torch.Tensor,
    params: npt.NDArray[np.void],
    masks: Sequence[npt.NDArray[np.uint8] | None] | None = None,
) -> npt.NDArray[np.void]:
    """Samples each row of logits as `params` says; see kernels/sampling.py."""
    for row, mask in enumerate(masks or ()):
        if mask is not None:
            _forbid(logits[row], mask)
    out = np.zeros(len(params), SAMPLED_ROW)
    for result, row, row_params in zip(out, logits.numpy(), params, strict=True):
        if np.isnan(row).any() or row.max() == np.inf:
            result["status"] = STATUS_INVALID
        elif row.max() == -np.inf:
            result["status"] = STATUS_EMPTY
        elif row_params["temperature"] == 0:
            token_id = int(row.argmax())
            result["token_id"], result["last_tie_id"] = token_id, token_id
            result["threshold"] = row[token_id]
        else:
            _sample_row(row, row_params, result)
    return out


def _forbid(row: torch.Tensor, mask: npt.NDArray[np.uint8]) -> None:
    allowed = np.zeros(len(row), np.bool_)
    bits = np.unpackbits(mask, bitorder="little")[: len(row)]
    allowed[: len(bits)] = bits
    row.masked_fill_(torch.from_numpy(~allowed), -torch.inf)


def _sample_row(row: FloatRow, params: Any, result: Any) -> None:
    temperature = float(params["temperature"])
    top_k, min_p, top_p = int(params["top_k"]), float(params["min_p"]), float(params["top_p"])
    x = row.astype(np.float64)
    threshold, last_tie_id = -np.inf, NO_TIE_CUT
    if min_p > 0:
        threshold = x.max() + temperature * np.log(min_p)
    if 0 < top_k < len(x):
        threshold = max(threshold, np.partition(x, -top_k)[-top_k])
    if top_p < 1:
        threshold, last_tie_id = _nucleus(x, temperature, threshold, top_p)
    ids = np.arange(len(x))
    kept = ids[(x > threshold) | ((x == threshold) & (ids <= last_tie_id))]
    sums = np.cumsum(np.exp((x[kept] - x.max()) / temperature))
    target = uniform_at(int(params["seed"]), int(params["counter"])) * sums[-1]
    drawn = min(int(np.searchsorted(sums, target, side="right")), len(kept) - 1)
    result["token_id"], result["last_tie_id"] = kept[drawn], last_tie_id
    result["threshold"] = _round_up(threshold)


def _nucleus(
    x: npt.NDArray[np.float64], temperature: float, floor: float, top_p: float
) -> tuple[float, int]:
    """Logit and id of the last token of the shortest run, best first, with top_p of the mass."""
    order = np.argsort(-x, kind="stable")
    order = order[x[order] >= floor]
    weights = np.exp((x[order] - x.max()) / temperature)
    sums = np.cumsum(weights)
    last = order[np.count_nonzero(sums - weights < max(top_p * sums[-1], 5e-324)) - 1]
    return float(x[last]), int(last)


def _round_up(value: float) -> np.float32:
    """The smallest float32 that is not below value."""
    rounded = np.float32(value)
    return np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < value else rounded


def logprob_rows(
    logits: torch.Tensor,
    row_ids: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    top_k: int,
) -> RowLogprobs:
    """log_softmax of some rows at a token each and at the best; see kernels/sampling.py."""
    num_rows, top_k = len(row_ids), min(top_k, logits.shape[1])
    out = RowLogprobs(
        np.full(num_rows, np.nan),
        token_ids + np.int32(1),
        np.tile(np.arange(top_k, dtype=np.int32), (num_rows, 1)),
        np.full((num_rows, top_k), np.nan),
    )
    for i, (row_id, token_id) in enumerate(zip(row_ids, token_ids, strict=True)):
        x = logits[row_id].numpy().astype(np.float64)
        if not np.isfinite(x.max()):
            continue
        norm = x.max() + np.log(np.exp(x - x.max()).sum())
        out.logprobs[i] = x[token_id] - norm
        is_tie = x[:token_id] == x[token_id]
        out.ranks[i] = 1 + np.count_nonzero(x > x[token_id]) + np.count_nonzero(is_tie)
        best = np.argsort(-x, kind="stable")[:top_k]
        out.top_ids[i], out.top_logprobs[i] = best, x[best] - norm
    return out
