"""Compiles sources to objects, only the stale ones, several at a time.

An object is stale when its command has changed, or when its source or a header that it included
is newer. Beside each object lie the headers it included (.d), its command (.command) and what the
compiler wrote (.log). A lock on the folder lets several processes share it. setup.py builds the
CUDA module with it, and tests/cuda_emulator the same sources for the CPU.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


class BuildError(Exception):
    """A compiler or the linker failed; the message holds the command and what it wrote."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder, made if missing, for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def object_path(folder: Path, source: Path) -> Path:
    """Where the object of a source lies."""
    return folder / f"{source.parent.name}_{source.name}.o"


def log_of(target: Path) -> Path:
    """What the compiler wrote when it made the target."""
    return target.with_name(target.name + ".log")


def compile_objects(
    sources: Sequence[Path], folder: Path, command: Callable[[Path], Sequence[str]]
) -> list[Path]:
    """The objects of the sources, in their order. command(source): the compiler and its flags."""
    jobs = [(source, object_path(folder, source)) for source in sources]
    stale = [job for job in jobs if is_stale(job[1], compile_command(*job, command))]
    # The largest first, so that no long one is left alone at the end.
    stale.sort(key=lambda job: (job[0].suffix == ".cu", job[0].stat().st_size), reverse=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda job: _run(job[1], compile_command(*job, command)), stale))
    return [target for _, target in jobs]


def compile_command(
    source: Path, target: Path, command: Callable[[Path], Sequence[str]]
) -> list[str]:
    """The whole command that makes a target."""
    dependencies = ["-MD", "-MF", f"{target}.d"]
    return [*command(source), "-c", str(source), "-o", str(target), *dependencies]


def link(target: Path, command: Sequence[str], objects: Sequence[Path]) -> None:
    """Links the objects if one of them is newer than the target."""
    whole = [*command, "-o", str(target), *map(str, objects)]
    newest = max(path.stat().st_mtime_ns for path in objects)
    if _is_changed(target, whole) or target.stat().st_mtime_ns < newest:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process that has it loaded keeps its own
        _run(target, whole)


def is_stale(target: Path, command: Sequence[str]) -> bool:
    """Whether this command has to make the target again."""
    return _is_changed(target, command) or is_outdated(target)


def is_outdated(target: Path) -> bool:
    """Whether the target is missing, or its source or a header is newer."""
    dependencies = Path(f"{target}.d")
    if not (target.exists() and dependencies.exists()):
        return True
    built = target.stat().st_mtime_ns
    _, _, listed = dependencies.read_text().partition(":")
    inputs = [Path(name) for name in listed.replace("\\\n", " ").split()]
    return any(not path.exists() or path.stat().st_mtime_ns > built for path in inputs)


def _is_changed(target: Path, command: Sequence[str]) -> bool:
    record = Path(f"{target}.command")
    return not (target.exists() and record.exists() and record.read_text() == shlex.join(command))


def _run(target: Path, command: Sequence[str]) -> None:
    """Runs a command that makes the target and keeps what it wrote."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        target.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}")
    log_of(target).write_text(done.stdout)
    Path(f"{target}.command").write_text(shlex.join(command))
