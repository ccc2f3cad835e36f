"""llmserve itself: its server, and its worker that measures without HTTP."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.models import ModelFiles
from bench.peers.peer import Context, Variant
from bench.peers.process import ServerCommand
from bench.peers.workloads import Figures

_REPETITIONS = 3
_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LlmServe:
    """Runs from the working copy that the comparison runs from."""

    name: str = "llmserve"
    max_rounds: int = 1000
    server_variants: Sequence[Variant] = ("--kv-cache-memory-bytes 256M",)

    def install(self, context: Context) -> None:
        """It is installed where the comparison runs."""

    def server(self, context: Context, model: ModelFiles, variant: Variant) -> ServerCommand | None:
        argv = [sys.executable, "-m", "llmserve", "--model", str(model.own), "--port", "{port}"]
        argv += ["--threads", str(context.threads), "--max-model-len", "2048"]
        argv += ["--disable-log-requests", *variant.split()]
        return ServerCommand(argv, {"PYTHONPATH": str(_REPOSITORY)})

    def measure_engine(self, context: Context, model: ModelFiles) -> dict[Variant, Figures]:
        argv = [sys.executable, "-m", "bench.peers.llmserve_worker", "--model", str(model.own)]
        argv += ["--threads", str(context.threads), "--seed", str(context.seed)]
        argv += ["--repetitions", str(_REPETITIONS)]
        result = subprocess.run(argv, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"llmserve ended with {result.returncode}: {result.stderr[-300:]}")
        seconds = json.loads(result.stdout.splitlines()[-1])
        return {
            "": {
                "prefill_tokens_per_s": 512 / statistics.median(seconds["prefill_s"]),
                "decode_tokens_per_s": 128 / statistics.median(seconds["decode_s"]),
            }
        }
