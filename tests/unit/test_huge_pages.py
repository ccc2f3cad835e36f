"""Memory in huge pages, and weights that are copied into it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from llmserve.config import ModelConfig
from llmserve.files.mapping import drop_pages, map_file
from llmserve.files.model import open_model
from llmserve.kernels import dequantize
from llmserve.kernels.huge_pages import HugePages, has_huge_pages
from llmserve.models import read_model


def test_pieces_are_zero_aligned_and_apart() -> None:
    memory = HugePages(2 * HugePages.size_of(100))

    first, second = memory.take(100), memory.take(100)

    first.fill_(7)
    assert second.shape == (100,)
    assert not second.any()
    assert second.data_ptr() % 64 == 0


def test_a_piece_that_is_too_large_is_refused() -> None:
    memory = HugePages(64)

    with pytest.raises(MemoryError, match="65 bytes are more than the reserve has left"):
        memory.take(65)


def test_the_reserve_outlives_its_owner() -> None:
    piece = HugePages(1 << 20).take(1 << 20)

    assert not piece.any()


@pytest.mark.skipif(not has_huge_pages(), reason="this system has no transparent huge pages")
def test_large_reserves_are_in_huge_pages() -> None:
    piece = HugePages(16 << 20).take(16 << 20)
    piece.fill_(1)

    assert _huge_bytes(piece.data_ptr()) >= 2 << 20


def test_dropped_pages_are_read_from_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(0).integers(0, 256, 5 * mmap.PAGESIZE, np.uint8)
    path.write_bytes(content.tobytes())
    view = np.frombuffer(map_file(path), np.uint8)
    assert np.array_equal(view, content)

    drop_pages(view.ctypes.data + 10, len(view) - 20)

    assert np.array_equal(view, content)


def test_weights_kept_in_memory_are_those_of_the_file() -> None:
    files = open_model(ModelConfig(), lambda line: None)
    config, mapped = read_model(files, dtype="auto", load_format="auto", seed=0)
    _, kept = read_model(files, dtype="auto", load_format="auto", seed=0)
    kept.keep_in_memory()

    for parameter, rows, cols in [("k", 256, 640), ("down", 640, 2048)]:
        for layer in range(config.num_layers):
            expected = mapped.matrix(parameter, rows, cols, layer)
            copy = kept.matrix(parameter, rows, cols, layer)
            assert copy.type == expected.type
            assert torch.equal(dequantize(copy), dequantize(expected))
            assert copy.data.data_ptr() != expected.data.data_ptr()


def _huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds the address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            is_inside = begin <= address < end
        elif is_inside and fields[0] == "AnonHugePages:":
            return int(fields[1]) * 1024
    raise AssertionError("the address is not mapped")
