"""transformers: generate() in an environment of its own, in bfloat16 and in float32."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.peers.install import make_venv
from bench.peers.models import ModelFiles
from bench.peers.peer import Context, Variant
from bench.peers.process import ServerCommand
from bench.peers.workloads import Figures

_WORKER = Path(__file__).with_name("transformers_worker.py")
# What its GGUF loader imports.
_EXTRAS = ("accelerate", "gguf", "sentencepiece", "protobuf")


@dataclass(frozen=True)
class Transformers:
    """Its environment also converts the models. It serves nothing here: its server ends at the
    end token and knows no prompts of token ids."""

    name: str = "transformers"
    max_rounds: int = 1000
    server_variants: Sequence[Variant] = ()

    def install(self, context: Context) -> None:
        pinned = [f"{name}=={version(name)}" for name in ("torch", "transformers")]
        # A local version such as +cpu may not be on the index that pip is configured with.
        make_venv(self._venv(context), [*(pin.partition("+")[0] for pin in pinned), *_EXTRAS])

    def python(self, context: Context) -> Path:
        return self._venv(context) / "bin" / "python"

    def _venv(self, context: Context) -> Path:
        return context.work_dir / "venv-transformers"

    def server(self, context: Context, model: ModelFiles, variant: Variant) -> ServerCommand | None:
        return None

    def measure_engine(self, context: Context, model: ModelFiles) -> dict[Variant, Figures]:
        if model.is_quantized or model.folder is None:
            return {}
        argv = [str(self.python(context)), str(_WORKER), "measure", str(model.folder)]
        argv.append(str(context.threads))
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"transformers ended with an error: {result.stderr[-300:]}")
        figures: dict[Variant, Figures] = json.loads(result.stdout.splitlines()[-1])
        return figures
