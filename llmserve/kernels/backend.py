"""The one place that knows which devices there are."""

from __future__ import annotations

from llmserve.kernels.cpu import CPUKernels
from llmserve.kernels.interface import Kernels


def make_kernels() -> Kernels:
    """The kernels of the device that the model runs on."""
    return CPUKernels()
