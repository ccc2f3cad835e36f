"""How nvcc is called: by setup.py for the module, by tests/cuda for its reports on the kernels."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "ext" / "cuda_kernels"
OBJECTS = ROOT / "build" / "nvcc"

# -Xptxas -v writes the registers, shared memory and spills of each kernel, which a test reads.
FLAGS = ["-O3", "-std=c++17", "-lineinfo", "-Xptxas", "-v"]
FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]


def find_nvcc() -> str | None:
    """The nvcc of PATH, else of CUDA_HOME."""
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(cuda_home, "bin"))


def compile_command(archs: Sequence[str], include_dirs: Sequence[str]) -> list[str]:
    """Machine code for each architecture, and PTX of the last for newer GPUs."""
    command = [find_nvcc() or "nvcc", *FLAGS]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    command.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    return [*command, *(f"-I{path}" for path in include_dirs)]
