"""Installing peers from the package registry, into folders of their own, so that it can be resumed.

Each step leaves a stamp behind when it has ended well; a step with a stamp is not done again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def once(stamp: Path, step: Callable[[], object]) -> None:
    """Runs `step` unless it has ended well before."""
    if stamp.exists():
        return
    step()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()


def run_logged(
    argv: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Raises RuntimeError that names the log if the command fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"  {Path(argv[0]).name} {' '.join(str(part) for part in argv[1:4])} ...", flush=True)
    with log.open("a") as output:
        result = subprocess.run(
            [str(part) for part in argv],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if result.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {result.returncode}; see {log}")


def make_venv(path: Path, requirements: Sequence[str], remove: Sequence[str] = ()) -> Path:
    """A virtual environment with `requirements` and without `remove`; returns its Python.

    pip's own configuration says which index the packages come from.
    """
    python = path / "bin" / "python"
    log = path.with_suffix(".log")

    def create() -> None:
        if not python.exists():
            venv.create(path, with_pip=True)
        run_logged([python, "-m", "pip", "install", *requirements], log)
        if remove:
            run_logged([python, "-m", "pip", "uninstall", "-y", *remove], log)

    once(path / "installed.stamp", create)
    return python


def unpack_sdist(requirement: str, target: Path) -> None:
    """Downloads a source distribution and unpacks what is in its one folder into `target`."""
    downloads = target.parent / "downloads"

    def fetch() -> None:
        downloads.mkdir(parents=True, exist_ok=True)
        name = requirement.partition("==")[0]
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name]
        run_logged([*pip, "--dest", downloads, requirement], target.with_suffix(".log"))
        [archive] = downloads.glob(f"{name.replace('-', '_')}-*.tar.gz")
        with tarfile.open(archive) as tar:
            folder = tar.getnames()[0].partition("/")[0]
            tar.extractall(target.parent, filter="data")
        (target.parent / folder).rename(target)

    once(target / "unpacked.stamp", fetch)
