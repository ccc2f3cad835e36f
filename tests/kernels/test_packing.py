"""Packed matrices: the same values and products, bit for bit, as those that they were made from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from llmserve.kernels import (
    HAS_EXT,
    GGMLType,
    StackedWeights,
    Weight,
    dequantize,
    embedding,
    keep,
    kept_bytes,
    linear,
    stacked_linear,
)
from llmserve.kernels.huge_pages import HugePages
from tests.kernels.weight_builders import (
    constant_weight,
    quantized_activations,
    random_weight,
    values_of,
)

if HAS_EXT:
    from llmserve import _cpu_kernels

    INSTRUCTION_SETS = _cpu_kernels.available_instruction_sets()
else:
    INSTRUCTION_SETS = ["reference"]

TYPES = list(GGMLType)
QUANTIZED = [type for type in TYPES if type.is_quantized]
# Rows and tokens; up to eight tokens some counts are computed with others' kernels.
PADDED = [(1, 1), (15, 2), (16, 3), (17, 4), (40, 5), (7, 6), (19, 7), (40, 8), (3, 9)]
needs_ext = pytest.mark.skipif(not HAS_EXT, reason="only compiled kernels read packed matrices")


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(request.param)
    yield
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


def kept(weight: Weight) -> Weight:
    num_bytes = kept_bytes(weight.type, weight.num_rows, weight.num_cols)
    return keep(weight, HugePages(HugePages.size_of(num_bytes)))


def byte_products(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    weights = StackedWeights([weight], [None], activation_bits=8)
    return stacked_linear(x, weights, torch.empty(len(x), weight.num_rows))


def col_counts(type: GGMLType) -> list[int]:
    if not type.is_quantized:
        return [1, 7, 16, 31, 96, 257, 640]
    return [c for c in (32, 96, 256, 288, 768) if c % type.block_len == 0]


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_packed_matrix_has_the_same_values(type: GGMLType) -> None:
    for num_cols in col_counts(type):
        for num_rows in (1, 15, 16, 17, 33):
            packed = kept(random_weight(type, num_rows, num_cols))

            assert packed.is_packed == HAS_EXT
            expected = torch.from_numpy(values_of(random_weight(type, num_rows, num_cols)))
            assert torch.equal(dequantize(packed), expected)
            ids = torch.tensor([num_rows - 1, 0])
            assert torch.equal(embedding(ids, packed), expected[ids])


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_products_have_the_same_bits(type: GGMLType) -> None:
    for num_cols in col_counts(type):
        for num_rows, num_tokens in [
            (1, 1),
            (15, 2),
            (16, 3),
            (17, 1),
            (40, 8),
            (33, 70),
            (9, 140),
        ]:
            weight = random_weight(type, num_rows, num_cols)
            x = torch.randn(num_tokens, num_cols, generator=torch.Generator().manual_seed(1))

            assert torch.equal(linear(x, kept(weight)), linear(x, weight))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_extreme_blocks_keep_their_values(type: GGMLType, byte: int) -> None:
    weight = constant_weight(type, byte, 18, 512)

    assert torch.equal(dequantize(kept(weight)), torch.from_numpy(values_of(weight)))
    x = torch.tensor([1.0, -1.0])[torch.arange(512) % 2].repeat(3, 1)
    assert torch.equal(linear(x, kept(weight)), linear(x, weight))


@needs_ext
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_products_with_activations_of_8_bits_are_those_of_rounded_ones(type: GGMLType) -> None:
    for num_rows, num_tokens in [(1, 1), (40, 3), (17, 8), (33, 27)]:
        weight = random_weight(type, num_rows, 512)
        x = torch.randn(num_tokens, 512, generator=torch.Generator().manual_seed(1))

        y = byte_products(x, weight)

        assert torch.equal(byte_products(x, kept(weight)), y)
        alone = [byte_products(x[i : i + 1].clone(), kept(weight)) for i in range(num_tokens)]
        assert torch.equal(torch.cat(alone), y)
        rounded = quantized_activations(x, steps=127)
        values = values_of(weight).astype(np.float64)
        magnitudes = np.abs(rounded) @ np.abs(values).T
        error = np.abs(y.double().numpy() - rounded @ values.T)
        assert (error <= 1e-6 * magnitudes + 1e-6 * magnitudes.max()).all()


@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.BF16], ids=lambda type: type.name)
def test_products_with_floats_ignore_the_bits_of_activations(type: GGMLType) -> None:
    weight = kept(random_weight(type, 33, 96))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))

    assert torch.equal(byte_products(x, weight), linear(x, weight))


@needs_ext
@pytest.mark.parametrize("byte", [0x00, 0x80, 0xFF])
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_largest_numbers_of_8_bits_do_not_overflow(type: GGMLType, byte: int) -> None:
    weight = constant_weight(type, byte, 18, 512)
    x = torch.stack([torch.ones(512), -torch.ones(512)])

    assert torch.equal(byte_products(x, kept(weight)), byte_products(x, weight))
    expected = x.double().numpy() @ values_of(weight).astype(np.float64).T
    np.testing.assert_allclose(byte_products(x, weight).numpy(), expected, rtol=1e-6)


def test_packed_and_stored_matrices_stack() -> None:
    weights = [random_weight(type, 21, 256) for type in (GGMLType.Q4_K, GGMLType.F16)]
    kinds = (GGMLType.Q6_K, GGMLType.BF16, GGMLType.Q8_0)
    weights += [kept(random_weight(type, 21, 256)) for type in kinds]
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))

    y = stacked_linear(x, StackedWeights(weights, [None, None, torch.ones(21), None, None]))

    parts = [linear(x, w, torch.ones(21) if i == 2 else None) for i, w in enumerate(weights)]
    assert torch.equal(y, torch.cat(parts, dim=1))


@needs_ext
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_packing_costs_less_than_a_twentieth(type: GGMLType) -> None:
    stored = 1024 * type.row_bytes(2048)

    assert kept_bytes(type, 1024, 2048) <= 1.05 * stored


@needs_ext
def test_matrix_is_packed_once() -> None:
    packed = kept(random_weight(GGMLType.Q8_0, 4, 64))

    with pytest.raises(ValueError, match="packed already"):
        keep(packed, HugePages(1 << 20))
    with pytest.raises(MemoryError):
        keep(random_weight(GGMLType.Q8_0, 4, 64), HugePages(64))
