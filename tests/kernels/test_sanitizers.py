"""The kernels under the address and undefined-behaviour sanitizers, where every finding is fatal.

The extensions are built a second time, into build/sanitized, and the tests of this folder run on
them in a process that has the sanitizer's runtime preloaded. Tensors lie on the heap, so an access
outside of one ends that process. Leaks are not looked for: the interpreter frees little at exit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZED = ROOT / "build" / "sanitized"

# Preceded by this, a program finds the sanitized modules where the others would be.
PRELUDE = f"""
import sys
import llmserve
llmserve.__path__.insert(0, {str(SANITIZED / "llmserve")!r})
from llmserve import _block_allocator, _cpu_kernels
assert _cpu_kernels.__file__.startswith({str(SANITIZED)!r})
assert _block_allocator.__file__.startswith({str(SANITIZED)!r})
"""

TESTS = """
import pytest
raise SystemExit(pytest.main(sys.argv[1:]))
"""

# The modules check nothing themselves, so they can be told to read where nothing is.
READ_PAST_THE_END = """
import torch
weight, out = torch.zeros(5, 34, dtype=torch.uint8), torch.empty(6, 32)
_cpu_kernels.dequantize(weight.data_ptr(), 8, out.data_ptr(), 6, 32)
"""

WRITE_PAST_THE_END = """
import torch
weight, out = torch.zeros(999, 34, dtype=torch.uint8), torch.empty(998, 32)
_cpu_kernels.set_num_threads(2)
_cpu_kernels.dequantize(weight.data_ptr(), 8, out.data_ptr(), 999, 32)
"""

READ_UNALIGNED_IDS = """
import torch
ids, weight, out = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 34), torch.empty(1, 32)
_cpu_kernels.embedding(ids.data_ptr() + 4, weight.data_ptr(), 8, 1.0, out.data_ptr(), 1, 1, 32)
"""


def library(name: str) -> str | None:
    """Path of a library of the compiler, None without the one or the other."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return None
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return path if os.path.isabs(path) else None


def run_sanitized(program: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    # libstdc++ too: the runtime looks for the functions behind `throw` when the process starts.
    preload = ":".join(filter(None, map(library, ("libasan.so", "libstdc++.so.6"))))
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LLMSERVE_NO_EXT": "0",
    }
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def build() -> None:
    """Builds what is not up to date: about a minute and a half on 2 cores at first."""
    if library("libasan.so") is None:
        assert os.environ.get("LLMSERVE_REQUIRE_EXT", "0") == "0", "needs g++ with libasan"
        pytest.skip("needs g++ with libasan")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=ROOT,
        env={**os.environ, "LLMSERVE_SANITIZE": "1", "LLMSERVE_REQUIRE_EXT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_sanitizers_find_nothing_while_the_tests_of_kernels_run() -> None:
    here = Path(__file__)
    # Findings are written to the descriptor of stderr, which only --capture=fd would take away.
    options = ["-v", "-n0", "--capture=sys", "-p", "no:cacheprovider", f"--ignore={here}"]

    done = run_sanitized(TESTS, [*options, str(here.parent)])

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:5000]


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        (READ_PAST_THE_END, "heap-buffer-overflow"),
        (WRITE_PAST_THE_END, "heap-buffer-overflow"),
        (READ_UNALIGNED_IDS, "misaligned address"),
    ],
    ids=["read past the end", "write past the end", "unaligned ids"],
)
def test_sanitizers_end_a_process_that(program: str, finding: str) -> None:
    done = run_sanitized(program + "\nprint('went on')")

    assert done.returncode != 0
    assert finding in done.stderr
    assert "went on" not in done.stdout
