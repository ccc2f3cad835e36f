"""Tokens and log-probabilities from rows of logits in the device's memory.

The rules are those of llmserve/kernels/sampling.py, with the same random numbers. Weights of tokens
are whole multiples of 2^-39 of the best one's, so that a row's sums have the same bits in whatever
order its blocks add them, alone or among other rows. Nothing here waits for the device, and
nothing but the arguments decides what is launched, so CUDA graphs can capture all of it.

Every function takes the compiled module first and raises ValueError for a wrong dtype, shape,
layout or device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmserve.kernels.checks import describe
from llmserve.kernels.cuda.checks import check, check_optional, stream_of
from llmserve.kernels.reference_sampling import SAMPLED_ROW, SAMPLING_ROW
from llmserve.kernels.row_edit import RowEdit

# Laid out as EditRow in ext/include/llmserve/cuda/sampling.h.
EDIT_ROW = np.dtype(
    [
        ("row", np.int32),
        ("mask_id", np.int32),
        ("banned", np.int32, 2),
        ("bias", np.int32, 2),
        ("penalty", np.int32, 2),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("forced_token_id", np.int32),
    ]
)


class Masks(NamedTuple):
    """Which tokens rows may have: row r has the mask words[ids[r]], or none if ids[r] is -1.

    words: int32 [num_masks, num_words]: bit i % 32 of word i // 32 is set if token i may be
    sampled; tokens beyond the words may not. ids: int32 [num_rows].
    """

    words: torch.Tensor
    ids: torch.Tensor


class DeviceLogprobs(NamedTuple):
    """RowLogprobs in the device's memory."""

    logprobs: torch.Tensor  # float64 [num_rows]
    ranks: torch.Tensor  # int32 [num_rows], 1 is the most likely token
    top_ids: torch.Tensor  # int32 [num_rows, top_k], best first, ties by lower id
    top_logprobs: torch.Tensor  # float64 [num_rows, top_k]


class PackedEdits(NamedTuple):
    """Edits of logits as the kernel reads them, in host memory."""

    rows: npt.NDArray[np.void]  # EDIT_ROW [num_edits]
    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    mask_words: npt.NDArray[np.int32]  # [num_masks, num_words]


def sampling_workspace(
    module: Any, num_rows: int, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Memory for sample_rows with up to that many rows of this vocabulary.

    Calls that share one must follow each other on one stream.
    """
    num_bytes = module.sampling_workspace_bytes(num_rows, vocab_size)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def logprob_workspace(
    module: Any, num_rows: int, vocab_size: int, top_k: int, device: torch.device
) -> torch.Tensor:
    """Memory for logprob_rows with up to that many rows, vocab_size and top_k."""
    num_bytes = module.logprob_workspace_bytes(
        num_rows, vocab_size, min(top_k, module.max_top_logprobs)
    )
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def stages_of(module: Any, params: npt.NDArray[np.void]) -> int:
    """What sample_rows has to launch for these rows (SAMPLING_ROW, in host memory)."""
    drawn = params[params["temperature"] > 0]
    stages = module.draw_stage if len(drawn) else 0
    stages |= module.top_k_stage if (drawn["top_k"] > 0).any() else 0
    stages |= module.top_p_stage if (drawn["top_p"] < 1).any() else 0
    return int(stages)


def sample_rows(
    module: Any,
    logits: torch.Tensor,
    params: torch.Tensor,
    workspace: torch.Tensor,
    *,
    stages: int | None = None,
    masks: Masks | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Samples one token per row.

    logits: float32 [num_rows, vocab_size], elements of a row adjacent; not changed.
    params: uint8 [num_rows, 48], the bytes of SAMPLING_ROW, contiguous.
    workspace: of sampling_workspace, for at least as many rows and this vocab_size.
    stages: of stages_of; a stage that is left out counts as off in every row. None: all of them.
    masks: forbidden tokens count as -inf.
    Returns int32 [num_rows, 4], the bytes of SAMPLED_ROW: `out` if given, else a new tensor.
    """
    num_rows, vocab_size = _check_logits(module, logits)
    device = logits.device
    shape = (num_rows, SAMPLED_ROW.itemsize // 4)
    out = torch.empty(shape, dtype=torch.int32, device=device) if out is None else out
    if stages is None:
        stages = module.draw_stage | module.top_k_stage | module.top_p_stage
    module.sample_rows(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        *_mask_arguments(masks, num_rows, device),
        check("params", params, torch.uint8, (num_rows, SAMPLING_ROW.itemsize), device),
        stages,
        check("out", out, torch.int32, shape, device),
        _check_workspace(workspace, module.sampling_workspace_bytes(num_rows, vocab_size), device),
        stream_of(logits),
    )
    return out


def sampled_rows(sampled: torch.Tensor) -> npt.NDArray[np.void]:
    """What sample_rows returned, once it is in host memory, as SAMPLED_ROW [num_rows]."""
    return sampled.numpy().view(SAMPLED_ROW)[:, 0]


def sampled_token_ids(sampled: torch.Tensor) -> torch.Tensor:
    """The tokens of what sample_rows returned: a view, int32 [num_rows]; 0 where there is none."""
    return sampled[:, 2]


def store_tokens(
    module: Any, sampled: torch.Tensor, target_rows: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """last_tokens[target_rows[i]] = the token of sampled[i], if it has one and the target is >= 0.

    sampled: of sample_rows; target_rows: int32 [num_rows]; last_tokens: int32 [max_rows]; all
    contiguous. Targets beyond last_tokens are not checked, nor are equal ones.
    """
    num_rows, width = sampled.shape
    device = sampled.device
    module.store_tokens(
        check("sampled", sampled, torch.int32, (num_rows, width), device),
        check("target_rows", target_rows, torch.int32, (num_rows,), device),
        check("last_tokens", last_tokens, torch.int32, tuple(last_tokens.shape), device),
        num_rows,
        stream_of(sampled),
    )


def logprob_rows(
    module: Any,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    top_k: int,
    workspace: torch.Tensor,
    *,
    row_ids: torch.Tensor | None = None,
    token_rows: torch.Tensor | None = None,
) -> DeviceLogprobs:
    """log_softmax of rows `row_ids` at one token each and at their top_k most likely tokens.

    logits: float32 [num_logit_rows, vocab_size], elements of a row adjacent. row_ids: int32 [n],
    contiguous; None: all rows. token_ids: int32 [n], may be strided; with token_rows, int32 [n],
    the i-th token is token_ids[token_rows[i]].
    workspace: of logprob_workspace, for at least these sizes.
    top_k above vocab_size counts as vocab_size; above module.max_top_logprobs the tokens come from
    a sort of the rows. A row with a NaN, a +inf or no finite logit gives NaN for every logprob, and
    so does a token outside the vocabulary. Row ids are not checked.
    """
    num_logit_rows, vocab_size = _check_logits(module, logits)
    device = logits.device
    num_rows = num_logit_rows if row_ids is None else len(row_ids)
    num_tokens = num_rows if token_rows is None else len(token_ids)
    if token_ids.dtype != torch.int32 or token_ids.shape != (num_tokens,):
        raise ValueError(f"token_ids must be int32 {(num_tokens,)}, not {describe(token_ids)}")
    top_k = min(top_k, vocab_size)
    kernel_top_k = top_k if top_k <= module.max_top_logprobs else 0
    out = DeviceLogprobs(
        torch.empty(num_rows, dtype=torch.float64, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, kernel_top_k, dtype=torch.int32, device=device),
        torch.empty(num_rows, kernel_top_k, dtype=torch.float64, device=device),
    )
    num_bytes = module.logprob_workspace_bytes(num_rows, vocab_size, kernel_top_k)
    module.logprob_rows(
        logits.data_ptr(),
        logits.stride(0),
        num_logit_rows,
        vocab_size,
        check_optional("row_ids", row_ids, torch.int32, (num_rows,), device),
        token_ids.data_ptr(),
        check_optional("token_rows", token_rows, torch.int32, (num_rows,), device),
        token_ids.stride(0),
        num_rows,
        kernel_top_k,
        *(x.data_ptr() for x in out),
        _check_workspace(workspace, num_bytes, device),
        stream_of(logits),
    )
    if kernel_top_k == top_k:
        return out
    rows = logits if row_ids is None else logits[row_ids.long()]
    return DeviceLogprobs(out.logprobs, out.ranks, *_sorted_logprobs(rows, top_k))


def _sorted_logprobs(rows: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities of the top_k most likely tokens of each row."""
    best = torch.sort(rows, dim=1, descending=True, stable=True)
    logprobs = best.values[:, :top_k].double() - rows.double().logsumexp(1, keepdim=True)
    top = rows.amax(1, keepdim=True)
    is_valid = top.isfinite() & ~rows.isnan().any(1, keepdim=True)
    first = torch.arange(top_k, device=rows.device).expand(len(rows), top_k)
    top_ids = torch.where(is_valid, best.indices[:, :top_k], first).to(torch.int32)
    return top_ids, logprobs.masked_fill(~is_valid, torch.nan)


def edit_logits(
    module: Any,
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    mask_words: torch.Tensor | None = None,
) -> None:
    """Edits rows of logits in place, as llmserve/kernels/row_edit.py.

    logits: float32 [num_rows, vocab_size], elements of a row adjacent. The rest is what pack_edits
    gave, copied to the device: rows uint8 [num_edits, 48], ids int32 and values float32 [n],
    mask_words int32 [num_masks, num_words] (None if no edit has a mask); all contiguous.
    """
    num_rows, vocab_size = _check_logits(module, logits)
    device = logits.device
    num_edits = len(rows)
    num_words = 0 if mask_words is None else mask_words.shape[1]
    shape = (0, 0) if mask_words is None else tuple(mask_words.shape)
    module.edit_logits(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        check_optional("mask_words", mask_words, torch.int32, shape, device),
        num_words,
        check("rows", rows, torch.uint8, (num_edits, EDIT_ROW.itemsize), device),
        num_edits,
        check("ids", ids, torch.int32, tuple(ids.shape), device),
        check("values", values, torch.float32, tuple(ids.shape), device),
        stream_of(logits),
    )


def pack_edits(edits: Sequence[RowEdit], vocab_size: int) -> PackedEdits:
    """Edits as edit_logits takes them, once they are copied to the device."""
    rows = np.zeros(len(edits), EDIT_ROW)
    ids: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.float32]] = []
    masks: list[npt.NDArray[np.uint8]] = []
    num_ids = 0
    for row, edit in zip(rows, edits, strict=True):
        row["row"] = edit.row
        row["mask_id"] = -1
        if edit.allowed_ids is not None:
            row["mask_id"] = len(masks)
            masks.append(_mask_of(edit.allowed_ids, vocab_size))
        none = np.zeros(len(edit.banned_ids), np.float32)
        for name, some_ids, some_values in (
            ("banned", edit.banned_ids, none),
            ("bias", edit.bias_ids, edit.bias),
            ("penalty", edit.penalty_ids, edit.penalty_counts),
        ):
            row[name] = num_ids, num_ids + len(some_ids)
            num_ids += len(some_ids)
            ids.append(some_ids)
            values.append(some_values)
        row["repetition_penalty"] = edit.repetition_penalty
        row["frequency_penalty"] = edit.frequency_penalty
        row["presence_penalty"] = edit.presence_penalty
        row["forced_token_id"] = -1 if edit.forced_token_id is None else edit.forced_token_id
    # Ids that do not fit are outside every vocabulary, as the largest that does.
    joined = np.minimum(np.concatenate([*ids, np.zeros(0, np.int64)]), np.iinfo(np.int32).max)
    return PackedEdits(
        rows,
        joined.astype(np.int32),
        np.concatenate([*values, np.zeros(0, np.float32)]),
        pack_masks(masks, vocab_size),
    )


def _mask_of(allowed_ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.uint8]:
    is_allowed = np.zeros(vocab_size, np.bool_)
    is_allowed[allowed_ids[allowed_ids < vocab_size]] = True
    return np.packbits(is_allowed, bitorder="little")


def pack_masks(masks: Sequence[npt.NDArray[np.uint8]], vocab_size: int) -> npt.NDArray[np.int32]:
    """Masks of any length, bit i % 8 of byte i // 8 for token i, as Masks.words on the host."""
    num_words = -(-vocab_size // 32)
    words = np.zeros((len(masks), 4 * num_words), np.uint8)
    for row, mask in zip(words, masks, strict=True):
        size = min(len(mask), len(row))
        row[:size] = mask[:size]
    return words.view("<i4")


def _check_logits(module: Any, logits: torch.Tensor) -> tuple[int, int]:
    if (
        logits.dtype != torch.float32
        or logits.dim() != 2
        or not 0 < logits.shape[1] <= module.max_vocab_size
        or logits.stride(1) != 1
    ):
        raise ValueError(
            "logits must be float32 [num_rows, vocab_size] with adjacent elements and at most "
            f"{module.max_vocab_size} of them in a row, not {describe(logits)}"
        )
    num_rows, vocab_size = logits.shape
    return num_rows, vocab_size


def _mask_arguments(
    masks: Masks | None, num_rows: int, device: torch.device
) -> tuple[int, int, int]:
    if masks is None:
        return 0, 0, 0
    words, ids = masks
    if words.dim() != 2:
        raise ValueError(f"masks.words must have two dimensions, not {describe(words)}")
    num_masks, num_words = words.shape
    return (
        check("masks.words", words, torch.int32, (num_masks, num_words), device),
        num_words,
        check("masks.ids", ids, torch.int32, (num_rows,), device),
    )


def _check_workspace(workspace: torch.Tensor, num_bytes: int, device: torch.device) -> int:
    if workspace.numel() < num_bytes:
        raise ValueError(
            f"the workspace has {workspace.numel()} bytes; these rows need {num_bytes}"
        )
    return check("workspace", workspace, torch.uint8, tuple(workspace.shape), device)
