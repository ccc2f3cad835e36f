"""Memory in huge pages, where the system has them to give.

A step reads the weights from one end to the other. In pages of 4 KiB much of that time goes to the
translation of addresses, above all in virtual machines: two cores read 25 GB/s there, and 33 GB/s
from transparent huge pages.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ALIGNMENT = 64  # bytes: of a cache line


def has_huge_pages() -> bool:
    """Whether memory can be asked for in huge pages."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


class HugePages:
    """A reserve of `num_bytes`, handed out in pieces. Pages are taken at the first touch."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the address space is not to be had."""
        # Shared memory, the default, gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
        if has_huge_pages():
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._num_taken = 0

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """What a piece of `num_bytes` takes of the reserve."""
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros. Raises MemoryError if the reserve has no more."""
        begin = self._num_taken
        if begin + num_bytes > self._bytes.numel():
            raise MemoryError(f"{num_bytes} bytes are more than the reserve has left")
        self._num_taken += self.size_of(num_bytes)
        return self._bytes[begin : begin + num_bytes]
