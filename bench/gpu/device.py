"""The GPU that figures are of; or, to try the code that makes them, the emulated kernels on the CPU
in its place, with times that mean nothing.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from llmserve.kernels import make_cuda_kernels
from llmserve.kernels.cuda.kernels import CUDAKernels
from llmserve.runner.cuda_graphs import CUDARecorder, Recorder
from llmserve.runner.cuda_load import DeviceMemory, GPUMemory

_MEASURED_S = 0.2  # of each figure
_MAX_ROUNDS = 50
_EMULATED_BYTES = 64 << 20


@dataclass(frozen=True)
class Device:
    """kernels_of: activations' type -> kernels. cache_bytes: several times the device's caches."""

    torch_device: torch.device
    kernels_of: Callable[[torch.dtype], CUDAKernels]
    module: Any
    memory: DeviceMemory
    recorder: Recorder
    cache_bytes: int

    @property
    def is_emulated(self) -> bool:
        return self.torch_device.type != "cuda"

    def synchronize(self) -> None:
        if not self.is_emulated:
            torch.cuda.synchronize()

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of one call, on average over them, launched one behind the other by a graph: the median
        of several rounds."""

        def run_all() -> None:
            for call in calls:
                call()

        replay = self.recorder.record(run_all)
        if self.is_emulated:
            start = time.perf_counter()
            replay()
            return (time.perf_counter() - start) / len(calls)
        first = _event_seconds(replay)
        num_rounds = max(3, min(_MAX_ROUNDS, int(_MEASURED_S / first)))
        rounds = [_event_seconds(replay) for _ in range(num_rounds)]
        return statistics.median(rounds) / len(calls)

    def num_copies(self, num_bytes: int) -> int:
        """Of data of that size, so that none is still in a cache when its turn comes again."""
        return max(1, min(64, -(-self.cache_bytes // max(1, num_bytes))))


def _event_seconds(work: Callable[[], None]) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@contextmanager
def open_device(*, is_tiny: bool) -> Iterator[Device]:
    """The emulation if is_tiny, else the GPU."""
    if not is_tiny:
        yield Device(
            torch.device("cuda"),
            make_cuda_kernels,
            importlib.import_module("llmserve._cuda_kernels"),
            GPUMemory(),
            CUDARecorder(),
            256 << 20,
        )
        return
    from tests.cuda.cuda_engine import ReplayingRecorder
    from tests.cuda_emulator import build
    from tests.cuda_emulator.device_memory import DeviceMemory as Watched
    from tests.cuda_emulator.device_memory import EmulatedModule, watching

    library = build.build("_cuda_kernels", build.kernel_sources())
    memory = Watched()
    module = EmulatedModule(build.load("_cuda_kernels", library), memory)
    cpu = torch.device("cpu")
    with watching(memory):
        yield Device(
            cpu,
            lambda dtype: CUDAKernels(module, cpu, dtype),
            module,
            _EmulatedMemory(),
            ReplayingRecorder(cpu),
            0,
        )


class _EmulatedMemory:
    """Enough for a tiny model."""

    total = _EMULATED_BYTES
    free = _EMULATED_BYTES
    allocated = 0

    def peak(self, work: Callable[[], None]) -> int:
        work()
        return 0
