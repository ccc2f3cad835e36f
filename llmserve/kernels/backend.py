"""The one place that knows which devices there are."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from llmserve.errors import StartupError
from llmserve.kernels.cuda.kernels import CUDAKernels

_MODULE = "llmserve._cuda_kernels"


def choose_device(name: str) -> str:
    """The device that a value of --device means. Raises StartupError for one that is not there."""
    if name == "cpu":
        return name
    obstacle = _cuda_obstacle()
    if name == "auto":
        return "cpu" if obstacle else "cuda"
    if obstacle:
        raise StartupError(f"--device cuda {obstacle}; --device cpu works without")
    return name


def make_cuda_kernels(act_dtype: torch.dtype) -> CUDAKernels:
    """The kernels of the GPU, where choose_device found one. act_dtype: of the activations."""
    return CUDAKernels(importlib.import_module(_MODULE), torch.device("cuda"), act_dtype)


def _cuda_obstacle() -> str | None:
    if torch.version.cuda is None:
        return "needs a GPU and a torch built for CUDA, and this torch is built for the CPU only"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU with a driver, and torch finds none here"
    if importlib.util.find_spec(_MODULE) is None:
        return (
            "needs the CUDA kernels, which are not built: install nvcc and reinstall with "
            "LLMSERVE_REQUIRE_EXT=1"
        )
    return None
