"""The number of threads that the compiled kernels use."""

from __future__ import annotations

from llmserve import _cpu_kernels


def get_num_threads() -> int:
    """Threads of a kernel, the caller's included; at first one per core of this process."""
    return _cpu_kernels.get_num_threads()


def set_num_threads(num_threads: int) -> None:
    """No result depends on it. Raises ValueError below 1."""
    _cpu_kernels.set_num_threads(num_threads)
