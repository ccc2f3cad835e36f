"""A step's input at fixed addresses in the device's memory, filled by one upload.

Captured graphs read it there. Block tables come last in the upload, as narrow as the step needs
them, and are spread to rows of full width on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmserve.kernels.cuda.transfer import InputRing
from llmserve.layers import AttentionInputs
from llmserve.models import ForwardBatch
from llmserve.runner.batch import StepArrays

_ALIGNMENT = 16  # bytes: of the widest loads of kernels
_PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class Feeds:
    """Where tokens come from and go to. Rows are those of the tensor of last tokens."""

    source_rows: npt.NDArray[np.int32]  # [num_tokens], -1: the token is known
    sampled_idx: npt.NDArray[np.int64]  # tokens of the step whose successors are sampled
    target_rows: npt.NDArray[np.int32]  # for each of them


class DeviceInputs:
    """Inputs of one step at a time; what a step has been given in the stream it may go on reading
    while the next one is filled in."""

    def __init__(
        self,
        device: torch.device,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        num_groups: int,
        max_blocks: int,
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self.max_num_seqs = max_num_seqs
        self._num_groups = num_groups
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (max_num_tokens,)),
            "positions": (torch.int64, (max_num_tokens,)),
            "slots": (torch.int64, (num_groups, max_num_tokens)),
            "sampled_idx": (torch.int64, (max_num_seqs,)),
            "seq_lens": (torch.int32, (max_num_seqs,)),
            "cu_seqlens": (torch.int32, (max_num_seqs + 1,)),
            "source_rows": (torch.int32, (max_num_tokens,)),
            "target_rows": (torch.int32, (max_num_seqs,)),
            "tables": (torch.int32, (num_groups * max_num_seqs * max_blocks,)),
        }
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        begin = 0
        for name, (dtype, shape) in shapes.items():
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            self._places[name] = (begin, num_bytes, dtype, shape)
            begin += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = torch.zeros(begin, dtype=torch.uint8, device=device)
        self._ring = InputRing(memory)
        self._there = {name: self._view(memory, name) for name in shapes}
        self._tables = torch.zeros(
            num_groups, max_num_seqs, max_blocks, dtype=torch.int32, device=device
        )

    def fill(
        self,
        arrays: StepArrays,
        feeds: Feeds,
        *,
        num_seqs: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Uploads a step, padded to `num_seqs` sequences with a token each, then to `num_tokens`
        tokens in all, which belong to no sequence. None: no padding of that kind."""
        num_filled = arrays.num_seqs
        seq_padding = 0 if num_seqs is None else num_seqs - num_filled
        padding = seq_padding if num_tokens is None else num_tokens - arrays.num_tokens
        host = self._ring.take()
        self._put(host, "token_ids", arrays.token_ids, padding, 0)
        self._put(host, "positions", arrays.positions, padding, 0)
        slots = self._view(host, "slots").numpy()
        slots[:, : arrays.num_tokens] = arrays.slots
        slots[:, arrays.num_tokens : arrays.num_tokens + padding] = _PADDING_SLOT
        self._put(host, "seq_lens", arrays.seq_lens, seq_padding, 0)
        cu_seqlens = self._view(host, "cu_seqlens").numpy()
        cu_seqlens[: num_filled + 1] = arrays.cu_seqlens
        cu_seqlens[num_filled + 1 : num_filled + 1 + seq_padding] = (
            arrays.num_tokens + 1 + np.arange(seq_padding)
        )
        self._put(host, "source_rows", feeds.source_rows, padding, -1)
        self._put(host, "sampled_idx", feeds.sampled_idx, 0, 0)
        self._put(host, "target_rows", feeds.target_rows, 0, 0)
        tables = arrays.tables
        self._put(host, "tables", tables.reshape(-1), 0, 0)
        self._ring.upload(self._places["tables"][0] + tables.nbytes)
        spread = self._tables[:, :num_filled, : tables.shape[2]]
        spread.copy_(self._there["tables"][: tables.size].view(tables.shape))

    def fill_padding(self, num_seqs: int, num_tokens: int | None = None) -> None:
        """A step of `num_seqs` sequences that are all padding, with `num_tokens` tokens in all, by
        default one each: K and V go nowhere, and no key is seen."""
        count = num_seqs if num_tokens is None else num_tokens
        zeros = np.zeros(count, np.int64)
        padding = StepArrays(
            token_ids=zeros,
            positions=zeros,
            slots=np.full((self._num_groups, count), _PADDING_SLOT),
            tables=np.zeros((self._num_groups, num_seqs, 0), np.int32),
            seq_lens=np.zeros(num_seqs, np.int64),
            cu_seqlens=np.arange(num_seqs + 1) * count // num_seqs,
            rows=np.zeros(num_seqs, np.int64),
            row_of_token=zeros,
            max_query_len=-(-count // num_seqs),
            max_seq_len=1,
        )
        none = np.zeros(0, np.int64)
        feeds = Feeds(np.full(count, -1, np.int32), none, none.astype(np.int32))
        self.fill(padding, feeds)

    def batch(
        self, num_tokens: int, num_seqs: int, max_query_len: int, max_seq_len: int
    ) -> ForwardBatch:
        """The first tokens and sequences, as a forward pass takes them."""
        there = self._there
        groups = tuple(
            AttentionInputs(
                there["positions"][:num_tokens],
                there["slots"][group, :num_tokens],
                self._tables[group, :num_seqs],
                there["seq_lens"][:num_seqs],
                there["cu_seqlens"][: num_seqs + 1],
                max_query_len,
                max_seq_len,
            )
            for group in range(self._num_groups)
        )
        return ForwardBatch(there["token_ids"][:num_tokens], groups, max_seq_len)

    def source_rows(self, num_tokens: int) -> torch.Tensor:
        return self._there["source_rows"][:num_tokens]

    def sampled_idx(self, num_sampled: int) -> torch.Tensor:
        return self._there["sampled_idx"][:num_sampled]

    def target_rows(self, num_sampled: int) -> torch.Tensor:
        return self._there["target_rows"][:num_sampled]

    def _view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        begin, num_bytes, dtype, shape = self._places[name]
        return memory[begin : begin + num_bytes].view(dtype).view(shape)

    def _put(
        self,
        host: torch.Tensor,
        name: str,
        values: npt.NDArray[Any],
        padding: int,
        value: int,
    ) -> None:
        place = self._view(host, name).numpy()
        place[: len(values)] = values
        place[len(values) : len(values) + padding] = value
