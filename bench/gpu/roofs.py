"""What this device gives at most: bytes a second of a copy, operations of a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.figures import Figures, read, value_of

_COPY_BYTES = 4 << 30
_MATRIX_SIZE = 8192
_COPY = "copy within the device's memory"
_MATMUL = "bfloat16 matrix product, 8192 x 8192 x 8192"


@dataclass(frozen=True, slots=True)
class Roofs:
    """bytes_per_s: read and written, together. flops_per_s: of bfloat16, a multiply-add is two.
    None where they were not measured."""

    bytes_per_s: float | None = None
    flops_per_s: float | None = None

    @property
    def gb_per_s(self) -> float | None:
        return None if self.bytes_per_s is None else self.bytes_per_s / 1e9

    def seconds(self, num_bytes: float, num_flops: float) -> float | None:
        """The least time for so much of both."""
        if self.bytes_per_s is None or self.flops_per_s is None:
            return None
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def measure_roofs(device: Device, figures: Figures) -> Roofs:
    """On an emulated device the code runs, and nothing is a bound of anything."""
    copy_bytes = 4096 if device.is_emulated else _COPY_BYTES
    figures.add(_COPY, 2 * copy_bytes / _copy_seconds(device, copy_bytes) / 1e9, "GB/s")
    size = 16 if device.is_emulated else _MATRIX_SIZE
    figures.add(_MATMUL, 2 * size**3 / _matmul_seconds(device, size) / 1e12, "TFLOP/s")
    return Roofs() if device.is_emulated else read_roofs(figures.rows)


def _copy_seconds(device: Device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return device.seconds([lambda: target.copy_(source)] * 4)


def _matmul_seconds(device: Device, size: int) -> float:
    """Of random values: zeros take less power, and so run faster than any model does."""
    a, b = (
        torch.randn(size, size, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2)
    )
    c = torch.empty_like(a)
    return device.seconds([lambda: torch.matmul(a, b, out=c)] * 4)


def read_roofs(rows: dict[str, dict[str, Any]]) -> Roofs:
    """From the figures of measure_roofs."""
    copy, matmul = value_of(rows, _COPY), value_of(rows, _MATMUL)
    return Roofs(
        None if copy is None else copy * 1e9,
        None if matmul is None else matmul * 1e12,
    )


def load_roofs(path: Path | None, device: Device) -> Roofs:
    """From the file of another process."""
    return Roofs() if device.is_emulated else read_roofs(read(path))
