"""llama.cpp and its fork ik_llama.cpp: their servers, and llama-bench.

The source comes with the source distributions of their Python bindings and is built for this CPU.
Decode and prefill are also measured by llama-bench, without HTTP, with flash attention off and on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.install import once, run_logged, unpack_sdist
from bench.peers.models import ModelFiles
from bench.peers.peer import Context, Variant
from bench.peers.process import ServerCommand
from bench.peers.workloads import Figures

_TARGETS = ("llama-server", "llama-bench", "llama-quantize")
_NUM_SLOTS = 32
_REPETITIONS = 3


@dataclass(frozen=True, eq=False)
class LlamaCpp:
    """One of the two source trees.

    source: its folder in the source distribution. missing_files: what the distribution lacks, by
    path in that folder.
    """

    name: str
    requirement: str
    source: str
    cmake_flags: Sequence[str]
    server_flags: Sequence[str]
    server_variants: Sequence[Variant]
    flash_attention_values: Sequence[str]
    missing_files: Mapping[str, str] = field(default_factory=dict)
    max_rounds: int = 1000

    def install(self, context: Context) -> None:
        root = self._root(context)
        unpack_sdist(self.requirement, root / "source")
        once(root / "built.stamp", lambda: self._build(root))

    def _build(self, root: Path) -> None:
        source = root / "source" / self.source
        for git in (root / "source" / ".git", source / ".git"):
            # It leads nowhere, and the build would look for changes in it for ever.
            if git.is_dir():
                shutil.rmtree(git)
            else:
                git.unlink(missing_ok=True)
        for name, text in self.missing_files.items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_text(text)
        build, log = root / "build", root / "build.log"
        flags = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DGGML_NATIVE=ON",
            "-DLLAMA_BUILD_TESTS=OFF",
            *self.cmake_flags,
        ]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        run_logged(["cmake", *generator, "-S", source, "-B", build, *flags], log)
        jobs = str(os.cpu_count() or 1)
        run_logged(["cmake", "--build", build, "-j", jobs, "--target", *_TARGETS], log)

    def install_tool(self, context: Context, name: str) -> None:
        """Builds one more program of the tree, beside those that install() has built."""
        root = self._root(context)
        jobs = str(os.cpu_count() or 1)
        argv: list[str | Path] = ["cmake", "--build", root / "build", "-j", jobs, "--target", name]
        once(root / f"{name}.stamp", lambda: run_logged(argv, root / "build.log"))

    def binary(self, context: Context, name: str) -> Path:
        return self._root(context) / "build" / "bin" / name

    def _root(self, context: Context) -> Path:
        return context.work_dir / self.name

    def server(self, context: Context, model: ModelFiles, variant: Variant) -> ServerCommand | None:
        threads = str(context.threads)
        argv = [str(self.binary(context, "llama-server")), "-m", str(model.gguf)]
        argv += ["--port", "{port}", "-t", threads, "-tb", threads]
        argv += ["-np", str(_NUM_SLOTS)]
        return ServerCommand([*argv, *self.server_flags, *variant.split()])

    def measure_engine(self, context: Context, model: ModelFiles) -> dict[Variant, Figures]:
        argv = [str(self.binary(context, "llama-bench")), "-m", str(model.gguf)]
        argv += ["-t", str(context.threads), "-p", "512", "-n", "128", "-r", str(_REPETITIONS)]
        argv += ["-fa", ",".join(self.flash_attention_values), "-o", "json"]
        result = subprocess.run(
            argv, cwd=context.work_dir, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(
                f"llama-bench ended with {result.returncode}: {result.stderr[-300:]}"
            )
        return parse_llama_bench(result.stdout)


def parse_llama_bench(text: str) -> dict[Variant, Figures]:
    """Medians of a JSON report's tests, by flash attention; other output may surround the JSON.

    A test is prefill (n_prompt tokens, no n_gen) or decode (n_gen tokens, no n_prompt).
    """
    results: dict[Variant, Figures] = {}
    for test in json.loads(text[text.index("[") : text.rindex("]") + 1]):
        is_on = str(test["flash_attn"]).lower() in ("1", "true", "on")
        figures = results.setdefault("-fa on" if is_on else "-fa off", {})
        samples = sorted(test["samples_ts"])
        median = (samples[(len(samples) - 1) // 2] + samples[len(samples) // 2]) / 2
        if test["n_prompt"] and not test["n_gen"]:
            figures["prefill_tokens_per_s"] = median
        elif test["n_gen"] and not test["n_prompt"]:
            figures["decode_tokens_per_s"] = median
    return results


LLAMA_CPP = LlamaCpp(
    name="llama.cpp",
    requirement="llama-cpp-python==0.3.36",
    source="vendor/llama.cpp",
    cmake_flags=("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF"),
    server_flags=("--kv-unified", "-c", "16384"),
    server_variants=(
        "-fa on",
        "-fa on --cache-ram 0",
        "-fa off --cache-ram 0",
        "-fa on --swa-full --cache-ram 0",
    ),
    flash_attention_values=("off", "on"),
)

IK_LLAMA_CPP = LlamaCpp(
    name="ik_llama.cpp",
    requirement="ik-llama-cpp-python==0.1.5",
    source="vendor/ik_llama.cpp",
    cmake_flags=("-DLLAMA_CURL=OFF", "-DGGML_IQK_FA_ALL_QUANTS=OFF"),
    # Every slot has a context of its own there: of 1,280 tokens, for the shared prefix.
    server_flags=("-c", "40960"),
    server_variants=("-fa on", "-fa off"),
    flash_attention_values=("0", "1"),
    missing_files={
        "common/cmake/build-info-gen-cpp.cmake": (
            "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n"
        )
    },
)
