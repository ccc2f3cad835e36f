"""Fixtures of the CUDA kernels' tests: on a GPU where there is one, else emulated on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cuda_emulator import build
from tests.cuda_emulator.device_memory import DeviceMemory, EmulatedModule, watching


def _built_module() -> Any:
    """llmserve._cuda_kernels if nvcc built it and a GPU can run it, else None."""
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module("llmserve._cuda_kernels")
    except ModuleNotFoundError:  # one that is there and cannot be loaded is an error
        return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of these tests live."""
    return torch.device("cuda" if _built_module() is not None else "cpu")


@pytest.fixture(scope="package", autouse=True)
def device_memory() -> Iterator[DeviceMemory]:
    """Poisons new tensors, and knows what the emulated kernels may touch."""
    memory = DeviceMemory()
    with watching(memory):
        yield memory


@pytest.fixture(scope="package")
def cuda_module(device: torch.device, device_memory: DeviceMemory) -> Any:
    """The kernels' module: the built one on a GPU, else the emulated one, whose findings raise."""
    if device.type == "cuda":
        return _built_module()
    library = build.build("_cuda_kernels", build.kernel_sources())
    return EmulatedModule(build.load("_cuda_kernels", library), device_memory)
