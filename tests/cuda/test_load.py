"""From weights and a device's memory to a runner: how the memory is divided."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from llmserve.errors import StartupError
from llmserve.files.model import open_model
from llmserve.kernels.cuda.kernels import CUDAKernels
from llmserve.models import read_model
from llmserve.runner.cuda_load import load_cuda_runner
from llmserve.runner.cuda_runner import CUDARunner
from llmserve.runner.memory import MemoryPlan

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WEIGHT_BYTES = 3 * MIB
ACTIVATION_BYTES = 2 * MIB


class FakeMemory:
    """A device of `total` bytes, on which weights and steps have the sizes above."""

    def __init__(self, total: int, free: int | None = None) -> None:
        self.total = total
        self.free = total if free is None else free
        self.num_measures = 0
        self._num_looks = 0

    @property
    def allocated(self) -> int:
        self._num_looks += 1
        return 0 if self._num_looks == 1 else WEIGHT_BYTES

    def peak(self, work: Callable[[], None]) -> int:
        self.num_measures += 1
        work()
        return WEIGHT_BYTES + ACTIVATION_BYTES


def load(
    folder: Path,
    module: Any,
    device: torch.device,
    memory: FakeMemory,
    *,
    changes: dict[str, Any] | None = None,
    **cache: Any,
) -> tuple[CUDARunner, MemoryPlan]:
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    config = ServerConfig(
        model=ModelConfig(model=str(folder), load_format="dummy", dtype="float32", seed=3),
        cache=CacheConfig(**{"block_size": 16} | cache),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8),
    )
    files = open_model(config.model, lambda line: None)
    model, weights = read_model(files, dtype="float32", load_format="dummy", seed=3)
    kernels = CUDAKernels(module, device, torch.float32)
    return load_cuda_runner(model, weights, config, kernels, memory, None)


def test_kv_cache_gets_what_weights_and_the_largest_steps_leave(
    tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    memory = FakeMemory(5 * MIB + 64 * 1024)

    runner, plan = load(tmp_path, cuda_module, device, memory, gpu_memory_utilization=1.0)

    # 2 (K and V) x 2 heads x 16 x 4 bytes x 16 tokens x 2 layers.
    assert plan.kv_spec.bytes_per_block == 8192
    assert plan.num_blocks == 8
    assert memory.num_measures == 1
    rows = {row.name: row.num_bytes for row in plan.budget.rows}
    assert rows["weights"] == WEIGHT_BYTES
    assert rows["activations"] == ACTIVATION_BYTES
    runner.probe()


def test_memory_that_others_hold_is_not_counted(
    tmp_path: Path, cuda_module: Any, device: torch.device
) -> None:
    memory = FakeMemory(1000 * MIB, free=5 * MIB + 64 * 1024)

    _, plan = load(tmp_path, cuda_module, device, memory)

    assert plan.num_blocks == 8


@pytest.mark.parametrize(
    ("memory", "settings", "words"),
    [
        (FakeMemory(5 * MIB + 8192), {}, "needs 5 KV cache blocks and there are"),
        (FakeMemory(64 * MIB), {"kv_cache_dtype": "float16"}, "must be auto, float32 or fp8"),
        (FakeMemory(64 * MIB), {"changes": {"head_dim": 18}}, "do not divide into the 16 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    memory: FakeMemory,
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    cuda_module: Any,
    device: torch.device,
) -> None:
    with pytest.raises(StartupError, match=words):
        load(tmp_path, cuda_module, device, memory, **settings)


def test_lack_of_memory_at_the_start_is_one_sentence(
    tmp_path: Path, cuda_module: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_out_of_memory(runner: CUDARunner) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(CUDARunner, "run_largest_steps", raise_out_of_memory)

    with pytest.raises(StartupError, match="lower --max-num-batched-tokens"):
        load(tmp_path, cuda_module, device, FakeMemory(64 * MIB))
