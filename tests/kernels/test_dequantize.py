"""Weights as float32, whole and by rows, bit for bit as the gguf package reads them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmserve.kernels import HAS_EXT, GGMLType, Weight, dequantize, embedding, linear
from tests.kernels.weight_builders import constant_weight, random_weight, values_of

if HAS_EXT:
    from llmserve import _cpu_kernels

    INSTRUCTION_SETS = [s for s in _cpu_kernels.available_instruction_sets() if s != "avx512_bf16"]
else:
    INSTRUCTION_SETS = ["reference"]

TYPES = list(GGMLType)
QUANTIZED = [type for type in TYPES if type.is_quantized]


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(request.param)
    yield
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_values_have_the_bits_of_the_gguf_package(type: GGMLType) -> None:
    for num_rows, num_cols in [(1, 256), (7, 512), (33, 2048), (3, 768)]:
        weight = random_weight(type, num_rows, num_cols)

        assert torch.equal(bits(dequantize(weight)), bits(torch.from_numpy(values_of(weight))))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_extreme_blocks_have_the_values_of_the_gguf_package(type: GGMLType, byte: int) -> None:
    weight = constant_weight(type, byte, 3, 256)

    assert torch.equal(dequantize(weight), torch.from_numpy(values_of(weight)))


@pytest.mark.parametrize("num_cols", [1, 5, 8, 31, 77])
def test_float_rows_may_have_any_length(num_cols: int) -> None:
    for type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        weight = random_weight(type, 3, num_cols)

        assert torch.equal(dequantize(weight), torch.from_numpy(values_of(weight)))


def test_half_precision_specials_keep_their_values() -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    weight = Weight.from_tensor(halves.reshape(256, 256))

    values = dequantize(weight)

    expected = halves.float().reshape(256, 256)
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("num_cols", [32, 64, 320])
def test_rows_of_few_groups_read_nothing_beyond_them(num_cols: int) -> None:
    for type in (t for t in QUANTIZED if t.block_len == 32):
        weight = random_weight(type, 5, num_cols)

        assert torch.equal(dequantize(weight), torch.from_numpy(values_of(weight)))


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_embedding_gives_the_rows_of_the_ids(type: GGMLType) -> None:
    weight = random_weight(type, 50, 256)
    token_ids = torch.tensor([49, 0, 7, 7, 23])

    rows = embedding(token_ids, weight)

    assert torch.equal(rows, torch.from_numpy(values_of(weight))[token_ids])


def test_embedding_scales_rows_into_the_tensor_that_it_is_given() -> None:
    weight = random_weight(GGMLType.Q8_0, 5, 64)
    token_ids = torch.tensor([4, 0])
    out = torch.full((2, 64), torch.nan)

    assert embedding(token_ids, weight, 25.25, out) is out

    assert torch.equal(out, torch.from_numpy(values_of(weight))[token_ids] * 25.25)


@pytest.mark.skipif(not HAS_EXT, reason="needs the compiled kernels")
def test_embedding_refuses_a_tensor_of_another_shape() -> None:
    with pytest.raises(ValueError, match="out must be contiguous"):
        embedding(torch.tensor([1]), random_weight(GGMLType.Q8_0, 5, 64), 1.0, torch.empty(2, 64))


def test_embedding_of_no_ids_is_empty() -> None:
    weight = random_weight(GGMLType.Q8_0, 5, 64)

    assert embedding(torch.empty(0, dtype=torch.int64), weight).shape == (0, 64)


@pytest.mark.parametrize("token_id", [-1, 5, 1 << 40])
def test_embedding_refuses_an_id_outside_the_matrix(token_id: int) -> None:
    if not HAS_EXT and token_id == -1:
        pytest.skip("torch counts negative indices from the end")
    weight = random_weight(GGMLType.Q8_0, 5, 64)

    with pytest.raises(IndexError):
        embedding(torch.tensor([0, token_id]), weight)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_read_only_file_mapping_serves_as_weight(type: GGMLType, tmp_path: Path) -> None:
    weight = random_weight(type, 6, 256)
    size = weight.data.numel()
    path = tmp_path / "weight"
    # The matrix ends where the mapping ends, at the end of a page.
    path.write_bytes(bytes(-size % mmap.PAGESIZE) + weight.data.numpy().tobytes())
    mapped = np.memmap(path, np.uint8, mode="c")[-size:].reshape(6, -1)
    x = torch.ones(2, 256)

    from_file = Weight(torch.from_numpy(mapped), type, 6, 256)

    assert torch.equal(dequantize(from_file), dequantize(weight))
    assert torch.equal(linear(x, from_file), linear(x, weight))
