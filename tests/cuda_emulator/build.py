"""Builds kernels with g++ against the emulator: the same .cu files and bindings that nvcc builds.

An object is compiled again when its command, its source or a header that it included is newer. The
compilers run two at a time. A lock lets several test processes share the folder.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent
EMULATED = ROOT / "build" / "emulated"
KERNELS = ROOT / "ext" / "cuda_kernels"
NUM_JOBS = 2

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


class BuildError(Exception):
    """A compiler or the linker failed; the message is what it wrote."""


def emulator_sources() -> list[Path]:
    return sorted(EMULATOR.glob("*.cpp"))


def kernel_sources() -> list[Path]:
    return sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cpp")])


def build(library: str, sources: Sequence[Path], folder: Path = EMULATED) -> Path:
    """Builds folder/library from these sources and the emulator, and returns its path."""
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    target = folder / f"{library}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [*sources, *emulator_sources()]
        with ThreadPoolExecutor(NUM_JOBS) as pool:
            built = list(pool.map(lambda source: _compile(source, objects), sources))
        command = ["g++", "-shared", "-pthread", "-o", str(target), *map(str, built), "-ldl"]
        newest = max(path.stat().st_mtime_ns for path in built)
        if _is_changed(target, command) or target.stat().st_mtime_ns < newest:
            target.unlink(missing_ok=True)  # never written to while another process has it loaded
            _run(target, command)
    return target


def load(name: str, library: Path) -> ModuleType:
    """The Python module `name` of a library, which can hold several."""
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flags(source: Path) -> list[str]:
    if source.suffix == ".cu":
        return KERNEL_FLAGS
    is_plain = source.parent == EMULATOR and not source.name.startswith("bindings")
    return EMULATOR_FLAGS if is_plain else BINDINGS_FLAGS


def _compile(source: Path, objects: Path) -> Path:
    name = str(source.relative_to(ROOT)).replace(os.sep, "_")
    target = objects / f"{name}.o"
    dependencies = objects / f"{name}.d"
    command = ["g++", *COMMON_FLAGS, *_flags(source), "-c", str(source), "-o", str(target)]
    command += ["-MMD", "-MF", str(dependencies)]
    if _is_changed(target, command) or _is_stale(target, dependencies):
        _run(target, command)
    return target


def _is_stale(target: Path, dependencies: Path) -> bool:
    if not dependencies.exists():
        return True
    built = target.stat().st_mtime_ns
    _, _, listed = dependencies.read_text().partition(":")
    inputs = [Path(name) for name in listed.replace("\\\n", " ").split()]
    return any(not path.exists() or path.stat().st_mtime_ns > built for path in inputs)


def _is_changed(target: Path, command: Sequence[str]) -> bool:
    """Whether the target is missing or another command made it."""
    record = target.with_name(target.name + ".command")
    return not (target.exists() and record.exists() and record.read_text() == shlex.join(command))


def _run(target: Path, command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        target.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(command)}\n{result.stderr}")
    if result.stderr:
        target.unlink(missing_ok=True)
        raise BuildError(f"warnings of {target.name}:\n{result.stderr}")
    target.with_name(target.name + ".command").write_text(shlex.join(command))


if __name__ == "__main__":
    print(build("_cuda_kernels", kernel_sources()))
