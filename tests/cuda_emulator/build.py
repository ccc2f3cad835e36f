"""Builds kernels with g++ against the emulator: the sources that nvcc builds, for the CPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pybind11
import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent
EMULATED = ROOT / "build" / "emulated"
KERNELS = ROOT / "ext" / "cuda_kernels"

COMMON_FLAGS = [
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-DLLMSERVE_EMULATED"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off"),
    *("-I", str(ROOT / "ext" / "include"), "-I", str(EMULATOR)),
    *("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]),
]
# Each load and store of a kernel calls the emulator. The compiler may not join neighbouring ones,
# which would hide their alignment, nor make library calls of loops, which would hide all of them.
# Return addresses must stay in the kernel: no sibling calls.
KERNEL_FLAGS = [
    *("-O2", "-g1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fno-store-merging"),
    *("-fno-tree-loop-distribute-patterns", "-fno-optimize-sibling-calls"),
    *("-fno-stack-protector", "-x", "c++"),
]
EMULATOR_FLAGS = ["-O3", "-g1", "-fno-stack-protector"]
BINDINGS_FLAGS = ["-O1", "-g0"]


def load(name: str, path: Path) -> Any:
    """The Python module of a file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


objects = load("objects", ROOT / "ext" / "objects.py")


def emulator_sources() -> list[Path]:
    return sorted(EMULATOR.glob("*.cpp"))


def kernel_sources() -> list[Path]:
    return sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cpp")])


def build(library: str, sources: Sequence[Path]) -> Path:
    """Builds build/emulated/library from these sources and the emulator; returns its path."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        assert os.environ.get("LLMSERVE_REQUIRE_EXT", "0") == "0", "needs g++ on x86-64"
        pytest.skip("the emulator needs g++ on x86-64")
    target = EMULATED / f"{library}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder = EMULATED / "objects"
    with objects.locked(folder):
        built = objects.compile_objects([*sources, *emulator_sources()], folder, _command)
        warnings = [objects.log_of(path).read_text() for path in built]
        if any(warnings):
            raise objects.BuildError("".join(warnings))
        objects.link(target, ["g++", "-shared", "-pthread", "-ldl"], built)
    return target


def _command(source: Path) -> list[str]:
    if source.suffix == ".cu":
        flags = KERNEL_FLAGS
    elif source.parent == EMULATOR:
        flags = EMULATOR_FLAGS
    else:
        flags = BINDINGS_FLAGS
    return ["g++", *COMMON_FLAGS, *flags]


if __name__ == "__main__":
    print(build("_cuda_kernels", kernel_sources()))
