"""The models of the comparison, made once: every format holds the same weights.

The demo model (Q4_K_M) is dequantised to BF16, in a GGUF file and in a Hugging Face folder; from
the former comes a file in Q8_0. A Qwen3 of 0.6B parameters with random weights stands for models
of which less fits into caches.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from bench.peers.install import once, run_logged
from bench.peers.random_qwen3 import write_random_qwen3

_WORKER = Path(__file__).with_name("transformers_worker.py")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """folder: safetensors with the same weights, for what does not read GGUF files."""

    name: str
    gguf: Path
    folder: Path | None
    is_quantized: bool

    @property
    def own(self) -> Path:
        """What llmserve is given: the folder where weights are not quantised."""
        return self.gguf if self.is_quantized or self.folder is None else self.folder


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model's matrices cost: bytes read for a token that is decoded alone, and
    multiply-adds of a token in the layers and in the logits. Attention over the context comes on
    top and is left out, so that floors made of this are below what any program needs."""

    weight_bytes: int
    layer_macs: int
    logit_macs: int


def read_cost(path: Path) -> Cost:
    """From the tensors of a GGUF file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    output = tensors.get("output.weight", tensors["token_embd.weight"])
    layers = [t for name, t in tensors.items() if name.startswith("blk.") and len(t.shape) > 1]
    return Cost(
        weight_bytes=int(output.n_bytes) + sum(int(tensor.n_bytes) for tensor in layers),
        layer_macs=sum(int(tensor.n_elements) for tensor in layers),
        logit_macs=int(output.n_elements),
    )


@dataclass(frozen=True, slots=True)
class Tools:
    """What converts models: llama.cpp's llama-quantize, and a Python that has transformers."""

    quantize: Path
    python: Path


class ModelStore:
    """Makes what is asked for and keeps it in `folder`."""

    def __init__(self, folder: Path, demo: Path, tools: Tools) -> None:
        self._folder = folder
        self._demo = demo
        self._tools = tools
        self._log = folder / "models.log"
        folder.mkdir(parents=True, exist_ok=True)

    def files(self, name: str) -> ModelFiles:
        """`name`: q4_k_m, q8_0, bf16, qwen3-q8_0 or qwen3-q4_k. Raises RuntimeError."""
        if name == "q4_k_m":
            return ModelFiles(name, self.gguf(name), self._demo_folder(), is_quantized=True)
        if name == "bf16":
            return ModelFiles(name, self.gguf(name), self._demo_folder(), is_quantized=False)
        return ModelFiles(name, self.gguf(name), None, is_quantized=True)

    def gguf(self, name: str) -> Path:
        """The GGUF file alone, for which llama.cpp's tools suffice; also f32, which files() lacks:
        the numbers of q4_k_m as they are, in float32."""
        if name == "q4_k_m":
            return self._demo_copy()
        if name == "bf16":
            return self._demo_bf16()
        if name == "f32":
            return self._dequantized("F32")
        if name == "q8_0":
            return self._quantized("demo-q8_0.gguf", self._demo_bf16(), "Q8_0")
        kind = {"qwen3-q8_0": "Q8_0", "qwen3-q4_k": "Q4_K_S"}[name]
        return self._quantized(f"{name}.gguf", self._qwen3_bf16(), kind)

    def _demo_copy(self) -> Path:
        """PSS would count a file by halves that somebody else's server has mapped too."""
        path = self._folder / "demo-q4_k_m.gguf"
        once(path.with_suffix(".stamp"), lambda: shutil.copyfile(self._demo, path))
        return path

    def _demo_folder(self) -> Path:
        folder = self._folder / "demo-hf"
        argv: list[str | Path] = [self._tools.python, _WORKER, "convert", self._demo, folder]
        once(folder / "complete.stamp", lambda: run_logged(argv, self._log))
        return folder

    def _demo_bf16(self) -> Path:
        return self._dequantized("BF16")

    def _dequantized(self, kind: str) -> Path:
        path = self._folder / f"demo-{kind.lower()}.gguf"
        self._make(path, [self._tools.quantize, "--allow-requantize", self._demo, path, kind])
        return path

    def _qwen3_bf16(self) -> Path:
        path = self._folder / "qwen3-bf16.gguf"
        once(path.with_suffix(".stamp"), lambda: write_random_qwen3(path))
        return path

    def _quantized(self, name: str, source: Path, kind: str) -> Path:
        """All matrices in one type, the embedding too."""
        path = self._folder / name
        self._make(path, [self._tools.quantize, "--pure", source, path, kind])
        return path

    def _make(self, path: Path, argv: Sequence[str | Path]) -> None:
        once(path.with_suffix(".stamp"), lambda: run_logged(argv, self._log))
