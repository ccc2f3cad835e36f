"""The decoder: one class for every supported architecture.

What differs between them is which parts a layer has; `loader.py` decides that. A row of the result
has the same bits whatever else is in the batch: all sums are in kernels whose order depends on the
row alone, and what is left is element-wise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmserve.kernels import Kernels
from llmserve.layers import (
    AttentionInputs,
    DecoderLayer,
    Embedding,
    LayerCache,
    LayerStack,
    Linear,
    RMSNorm,
    RotaryTable,
    Scratch,
)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of a step, flat, sequence after sequence."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    groups: tuple[AttentionInputs, ...]  # one per KV cache group
    max_seq_len: int


class Decoder:
    """A decoder-only transformer. Holds weights; the KV cache comes with each call."""

    def __init__(
        self,
        kernels: Kernels,
        embedding: Embedding,
        first_norm: RMSNorm | None,
        layers: Sequence[DecoderLayer],
        output: Linear,
        rotary_tables: Sequence[RotaryTable],
        scratch: Scratch,
        *,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        self._kernels = kernels
        self.layers = LayerStack(kernels, layers, scratch)
        self.vocab_size = output.num_rows
        self._embedding = embedding
        self._scratch = scratch
        self._residual = Scratch(kernels.device, torch.float32)
        self._first_norm = first_norm
        self._output = output
        self._rotary_tables = rotary_tables
        self._logit_scale = logit_scale
        self._logit_softcap = logit_softcap

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Normalised hidden states: activations [num_tokens, hidden_size], valid until the next
        call.

        caches: one per layer. K and V of the batch's tokens are written to them.
        """
        self.reserve_positions(batch.max_seq_len)
        shape = batch.token_ids.shape[0], self._output.num_cols
        residual = self._embedding(batch.token_ids, self._residual.take("residual", *shape))
        if self._first_norm is None:
            x = self._kernels.as_activations(residual)
        else:
            x = self._first_norm(residual, self._scratch.take("input", *shape))
        return self.layers(x, residual, batch.groups, caches)

    def reserve_positions(self, num_positions: int) -> None:
        """Makes positions 0 .. num_positions - 1 usable; forward does so itself."""
        for table in self._rotary_tables:
            table.reserve(num_positions)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: rows of forward's result, contiguous [n, hidden_size].

        Returns float32 [n, vocab_size], which the caller owns: `out` if given.
        """
        if out is None:
            out = torch.empty(hidden.shape[0], self.vocab_size, device=self._kernels.device)
        logits = self._output(hidden, out)
        if self._logit_scale != 1.0:
            logits.mul_(self._logit_scale)
        if self._logit_softcap is not None:
            self._kernels.softcap(logits, self._logit_softcap)
        return logits
