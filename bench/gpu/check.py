"""Builds, tests and measures the CUDA backend; see bench/gpu_check.sh.

The last line is JSON: the machine, what became of each phase, all figures and all targets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import figures
from bench.gpu.phases import FAILED, ROOT, SKIPPED, TIMED_OUT, Phase, Phases

STANDINS = ROOT / "bench" / "gpu" / "standins"
TOTAL_S = 465.0
SHAPES = ["llama-3-8b", "qwen3-0.6b"]
# One or two of each kernel, quick both under an emulator and under the sanitizer.
FEW = [
    "tests/cuda/test_attention.py::test_padding_is_zeros",
    "tests/cuda/test_attention.py::test_caches_of_another_type_than_the_queries",
    "tests/cuda/test_elementwise.py::test_softcap",
    "tests/cuda/test_elementwise.py::test_gather_rows_takes_strided_rows_and_gives_zeros_for"
    "_negative_ids",
    "tests/cuda/test_write_kv.py::test_values_are_divided_by_the_scale_of_their_head",
    "tests/cuda/test_sampling.py::test_greedy_takes_the_lowest_id_of_the_best",
    "tests/cuda/test_sampling.py::test_rows_may_be_strided_and_unaligned",
    "tests/cuda/test_linear.py::test_more_tokens_take_more_passes_over_the_matrix",
]
MODELS = ["tests/cuda/test_model.py", "tests/cuda/test_piecewise.py"]
# With the package, for which there is no stand-in.
WRITE_GGUF = [
    "tests/cuda/test_model.py::test_quantised_weights_give_the_tokens_of_the_cpu",
    "tests/cuda/test_piecewise.py::test_quantised_weights_are_decoded_within_a_piece",
]
MODULE = ROOT / "llmserve" / f"_cuda_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
# These need no device: they test the emulator, the compiler's reports, this program.
HOST_TESTS = [
    "test_emulator",
    "test_emulated_numbers",
    "test_recording",
    "test_ptxas",
    "test_gpu_check",
]
SANITIZER_FAILS = "9"


class Check:
    """One run. folder: for what phases leave. is_quick: a few tests, nothing is built. is_tiny:
    figures of the emulated kernels."""

    def __init__(self, folder: Path, *, is_quick: bool, is_tiny: bool) -> None:
        self._folder = folder
        self._tables: list[str] = []
        self._is_quick = is_quick
        self._is_tiny = is_tiny
        self._phases = Phases(TOTAL_S)
        self._environment: dict[str, str] = {}
        if not has("gguf"):
            print("no gguf package: the CPU's kernels say what quantised matrices hold")
            paths = [str(STANDINS), os.environ.get("PYTHONPATH", "")]
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._machine = probe(self._environment)
        self._has_gpu = "gpu" in self._machine

    def run(self) -> int:
        """The exit status."""
        print(json.dumps(self._machine))
        self._folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        failed = []
        try:
            if "error" in self._machine:
                raise RuntimeError(f"torch cannot be used: {self._machine['error']}")
            self._build()
            if self._has_gpu and not MODULE.exists():
                raise RuntimeError("there is a GPU, and the CUDA kernels are not built")
            self._test()
            self._measure()
            self._sanitize()
        except Exception as error:  # the figures so far are worth a line whatever happens
            failed = [f"check: {error}"]
        failed += self._phases.named(FAILED, TIMED_OUT)
        summary = json.dumps(self._summary(failed, time.monotonic() - begin), separators=(",", ":"))
        (self._folder / "summary.json").write_text(summary)  # a terminal may cut so long a line
        print(summary, flush=True)
        return 1 if failed else 0

    def _build(self) -> None:
        """In place for the GPU that is here; without one, where nothing runs it."""
        if self._is_quick:
            self._phases.skip("build", "--quick runs what is there")
            return
        command = [sys.executable, "setup.py", "build_ext"]
        environment = {"LLMSERVE_REQUIRE_EXT": "1"}
        if self._has_gpu:
            command.append("--inplace")
            environment["LLMSERVE_CUDA_ARCHS"] = self._machine["arch"]
        else:
            command += [f"--build-lib={self._folder / 'lib'}"]
        # All modules side by side. The CPU's have their objects in build/temp*.
        command += ["--parallel=3"]
        # Without the kernels nothing else can be done, so they may take most of the time.
        limit_s = 320.0 if self._has_gpu else TOTAL_S
        if not self._run("build", command, limit_s, environment) and self._has_gpu:
            # A module that cannot be built holds up the others: these are worth figures.
            environment["LLMSERVE_REQUIRE_EXT"] = "0"
            self._run("build of what can be built", command, limit_s, environment)

    def _test(self) -> None:
        name = "kernel tests" if self._has_gpu else "kernel tests, emulated"
        if self._is_quick:
            self._pytest(name, FEW, 60.0)
            return
        host = [f"--ignore=tests/cuda/{test}.py" for test in HOST_TESTS]
        without = [] if has("gguf") else [f"--deselect={test}" for test in WRITE_GGUF]
        if not self._has_gpu:
            self._pytest(name, ["tests/cuda", host[-1], *without], 300.0)
            return
        models = [f"--ignore={path}" for path in MODELS]
        self._pytest(name, ["tests/cuda", *models, *host], 110.0)
        self._pytest("model tests", [*MODELS, *without], 70.0)

    def _measure(self) -> None:
        if not self._has_gpu:
            print("\nno GPU: no figures", flush=True)
        if not (self._has_gpu or self._is_tiny):
            for name in ("kernel figures", "llmserve figures", "transformers figures"):
                self._phases.skip(name, "no GPU")
            return
        tiny = [] if self._has_gpu else ["--tiny"]
        self._figures("kernels", ["bench.gpu.kernels", *tiny], 70.0)
        roofs = ["--roofs", str(self._path("kernels"))]
        shapes = SHAPES if self._has_gpu else ["tiny"]
        for shape in shapes:
            arguments = ["--shape", shape, *roofs, *tiny]
            self._figures(f"llmserve {shape}", ["bench.gpu.serve", *arguments], 80.0)
        for shape in shapes:
            beside = ["--beside", str(self._path(f"llmserve {shape}"))]
            arguments = ["--shape", shape, *roofs, *beside, *tiny]
            self._figures(f"transformers {shape}", ["bench.gpu.peer", *arguments], 70.0)

    def _sanitize(self) -> None:
        tool = shutil.which("compute-sanitizer") or shutil.which(
            "compute-sanitizer", path="/usr/local/cuda/bin"
        )
        if not self._has_gpu or tool is None:
            why = "compute-sanitizer was not found" if self._has_gpu else "no GPU"
            self._phases.skip("sanitizer", why)
            return
        options = ["--tool", "memcheck", "--error-exitcode", SANITIZER_FAILS]
        options += ["--report-api-errors", "no"]
        command = [tool, *options, *pytest_command(FEW, num_processes=0)]
        # Each tensor in an allocation of its own, whose ends the tool knows.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        excuses = {"Device not supported": "compute-sanitizer does not support this device"}
        self._run("sanitizer", command, 90.0, environment, excuses)

    def _figures(self, name: str, arguments: list[str], limit_s: float) -> None:
        path = self._path(name)
        path.unlink(missing_ok=True)
        self._tables.append(name)
        command = [sys.executable, "-m", *arguments, "--figures", str(path)]
        self._run(f"{name} figures", command, limit_s)

    def _path(self, table: str) -> Path:
        """Without spaces, which not everything that copies files bears."""
        return self._folder / f"{table.replace(' ', '-')}.json"

    def _pytest(self, name: str, arguments: list[str], limit_s: float) -> None:
        cores = os.cpu_count() or 1
        num_processes = 0 if self._is_quick or not has("xdist") else min(4, cores)
        self._run(name, pytest_command(arguments, num_processes), limit_s)

    def _run(
        self,
        name: str,
        command: list[str],
        limit_s: float,
        environment: dict[str, str] | None = None,
        excuses: dict[str, str] | None = None,
    ) -> bool:
        variables = self._environment | (environment or {})
        return self._phases.run(Phase(name, command, limit_s, variables, excuses or {}))

    def _summary(self, failed: list[str], seconds: float) -> dict[str, Any]:
        tables = {name: figures.read(self._path(name)) for name in self._tables}
        missed = [
            f"{table}: {name}"
            for table, rows in tables.items()
            for name, row in rows.items()
            if row.get("met") is False
        ]
        skipped = self._phases.named(SKIPPED)
        return {
            "machine": self._machine,
            "gpu": self._machine.get("gpu"),
            "is_emulated": self._is_tiny and not self._has_gpu,
            "failed": failed,
            "skipped": {name: self._phases.outcomes[name].why for name in skipped},
            "missed_targets": missed,
            "seconds": {
                name: round(outcome.seconds, 1) for name, outcome in self._phases.outcomes.items()
            }
            | {"all": round(seconds, 1)},
            "figures": tables,
        }


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def pytest_command(arguments: Sequence[str], num_processes: int) -> list[str]:
    # Only the conftest.py of these tests: others need packages that a GPU's machine may lack.
    command = [sys.executable, "-m", "pytest", "-c", "bench/gpu/pytest.ini", "--rootdir=."]
    command += ["--confcutdir=tests/cuda", *arguments]
    return command + (["-n", str(num_processes), "--dist=loadfile"] if num_processes else [])


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """What bench.gpu.probe prints; "error" if it cannot say."""
    command = [sys.executable, "-m", "bench.gpu.probe"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts
    except subprocess.CalledProcessError as error:
        return {"error": error.stderr[-400:]}
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": str(error)}


def _raise_stopped(number: int, frame: object) -> None:
    raise TimeoutError("it was told to stop")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few tests; nothing is built")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="without a GPU: run the code of the figures over the emulated kernels",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _raise_stopped)
    return Check(options.out, is_quick=options.quick, is_tiny=options.tiny).run()


if __name__ == "__main__":
    sys.exit(main())
