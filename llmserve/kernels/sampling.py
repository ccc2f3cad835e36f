"""Tokens and log-probabilities from rows of logits.

This module checks; the compiled extension computes, each row alone and in a fixed order, so that a
row gives the same bits alone or among any others, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from llmserve import _cpu_kernels
from llmserve.kernels.reference_sampling import SAMPLED_ROW, SAMPLING_ROW, RowLogprobs

# Laid out as TokenMask in ext/include/llmserve/sampling.h.
_TOKEN_MASK = np.dtype([("bits", np.uintp), ("num_bytes", np.int64)])


def sample_rows(
    logits: torch.Tensor,
    params: npt.NDArray[np.void],
    masks: Sequence[npt.NDArray[np.uint8] | None] | None = None,
) -> npt.NDArray[np.void]:
    """Samples one token per row.

    logits: float32 [num_rows, vocab_size], elements of a row adjacent; only masks change them.
    params: SAMPLING_ROW [num_rows], contiguous. Returns SAMPLED_ROW [num_rows].
    masks: for each row None or uint8 [num_bytes], contiguous, of any length: bit i % 8 of byte
    i // 8 is set if token i may be sampled, and tokens beyond a mask may not. Forbidden tokens
    count as -inf; which of them also become it in `logits` is not defined.

    Temperature 0 takes the highest logit, of equal ones the lowest id. Else, as vLLM does: logits
    are divided by the temperature; min_p keeps tokens with at least min_p times the highest
    probability; top_k keeps, of those, the k best and all that equal the k-th; top_p keeps, of
    those, the shortest run from the best downwards (equal logits by lower id) whose share of the
    remaining probability is at least top_p. Then uniform_at(seed, counter) picks from the kept
    tokens through their cumulative probability in id order.

    Cost: one pass for greedy rows, two for temperature alone; filters look again at the parts of
    the row that they may keep. Raises ValueError for a wrong dtype, shape, layout or device.
    """
    _check_logits(logits)
    _check_array("params", params, SAMPLING_ROW, len(logits))
    addresses = None if masks is None else _mask_addresses(masks, len(logits))
    out = np.zeros(len(logits), SAMPLED_ROW)
    _cpu_kernels.sample_rows(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[0],
        logits.shape[1],
        params,
        0 if addresses is None else addresses.ctypes.data,
        out,
    )
    return out


def _mask_addresses(
    masks: Sequence[npt.NDArray[np.uint8] | None], num_rows: int
) -> npt.NDArray[np.void]:
    if len(masks) != num_rows:
        raise ValueError(f"{num_rows} rows need as many masks, not {len(masks)}")
    addresses = np.zeros(num_rows, _TOKEN_MASK)
    for row, mask in enumerate(masks):
        if mask is not None:
            _check_array("masks", mask, np.dtype(np.uint8), mask.size)
            addresses[row] = (mask.ctypes.data, mask.size)
    return addresses


def logprob_rows(
    logits: torch.Tensor,
    row_ids: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    top_k: int,
) -> RowLogprobs:
    """log_softmax of rows `row_ids` at one token each and at their top_k most likely tokens.

    logits: float32 [num_rows, vocab_size], elements of a row adjacent; row_ids and token_ids:
    int32 [n], contiguous. top_k above vocab_size counts as vocab_size. A row with a NaN, a +inf or
    no finite logit gives NaN for every logprob. Raises ValueError for a wrong dtype, shape, layout
    or device and IndexError for an id outside the logits.
    """
    _check_logits(logits)
    num_rows, vocab_size = logits.shape
    top_k = min(top_k, vocab_size)
    _check_array("row_ids", row_ids, np.dtype(np.int32), len(row_ids))
    _check_array("token_ids", token_ids, np.dtype(np.int32), len(row_ids))
    for name, ids, limit in (("row_ids", row_ids, num_rows), ("token_ids", token_ids, vocab_size)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
            raise IndexError(f"{name} must lie in [0, {limit}), not {ids.min()} to {ids.max()}")
    out = RowLogprobs(
        np.empty(len(row_ids), np.float64),
        np.empty(len(row_ids), np.int32),
        np.empty((len(row_ids), top_k), np.int32),
        np.empty((len(row_ids), top_k), np.float64),
    )
    _cpu_kernels.logprob_rows(
        logits.data_ptr(),
        logits.stride(0),
        len(row_ids),
        vocab_size,
        row_ids.ctypes.data,
        token_ids.ctypes.data,
        top_k,
        out.logprobs.ctypes.data,
        out.ranks.ctypes.data,
        out.top_ids.ctypes.data,
        out.top_logprobs.ctypes.data,
    )
    return out


def _check_logits(logits: torch.Tensor) -> None:
    if (
        logits.dtype != torch.float32
        or logits.dim() != 2
        or logits.shape[1] == 0
        or logits.stride(1) != 1
        or logits.device.type != "cpu"
    ):
        raise ValueError(
            "logits must be float32 [num_rows, vocab_size] in CPU memory with adjacent elements, "
            f"not {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()} "
            f"on {logits.device}"
        )


def _check_array(name: str, array: npt.NDArray[np.generic], dtype: np.dtype, size: int) -> None:
    # Comparing dtypes with fields compares field by field, and mostly it is the same object.
    is_dtype = array.dtype is dtype or array.dtype == dtype
    if not is_dtype or array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {(size,)}, "
            f"not {array.dtype} {array.shape} with strides {array.strides}"
        )
