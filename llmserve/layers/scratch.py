"""Memory for values that live within one layer, reused by all layers of all steps.

Taking megabytes from the system for every product costs more page faults than the products of a
short prompt can hide: a quarter of the time of a step of 256 tokens.
"""

from __future__ import annotations

import torch


class Scratch:
    """One buffer per role, as large as the largest step has needed. For one thread at a time.

    A tensor is valid until its role is taken again, so a role must not be taken while the last
    value in it is still to be read.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}
        self._taken: dict[str, torch.Tensor] = {}
        # Captured graphs go on using the buffers that they were captured with.
        self._outgrown: list[torch.Tensor] = []

    def take(self, role: str, num_rows: int, num_cols: int) -> torch.Tensor:
        """[num_rows, num_cols], contiguous, with arbitrary content: the same tensor as the last
        time if it had that shape."""
        taken = self._taken.get(role)
        if taken is not None and taken.shape == (num_rows, num_cols):
            return taken
        size = num_rows * num_cols
        buffer = self._buffers.get(role)
        if buffer is None or buffer.numel() < size:
            if buffer is not None and self._device.type != "cpu":
                self._outgrown.append(buffer)
            buffer = self._buffers[role] = torch.empty(size, dtype=self._dtype, device=self._device)
        taken = self._taken[role] = buffer[:size].view(num_rows, num_cols)
        return taken
