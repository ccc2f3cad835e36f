"""Products with bfloat16 weights where the CPU multiplies bfloat16 itself (AVX-512 BF16).

Everywhere else such weights are widened to float32: test_linear.py. Here activations are rounded to
bfloat16, so the oracle is the float64 product of rounded activations.
"""

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
    get_num_threads,
    linear,
    set_num_threads,
    stacked_linear,
)
from tests.kernels.weight_builders import random_weight, values_of

if HAS_EXT:
    from llmserve import _cpu_kernels

NAME = "avx512_bf16"
pytestmark = pytest.mark.skipif(
    not HAS_EXT or NAME not in _cpu_kernels.available_instruction_sets(),
    reason="this CPU has no products of bfloat16",
)

# Twice the largest seen, of the sum of the magnitudes of the terms: chains of 128 float32 sums.
TOLERANCE = 4e-7


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def activations(num_tokens: int, num_cols: int) -> torch.Tensor:
    x = torch.randn(num_tokens, num_cols, generator=torch.Generator().manual_seed(0))
    return x * torch.logspace(-3, 3, num_tokens)[:, None]


def weight_of(num_rows: int, num_cols: int, seed: int = 0) -> Weight:
    return random_weight(GGMLType.BF16, num_rows, num_cols, seed)


@pytest.mark.parametrize("num_cols", [1, 15, 16, 17, 31, 32, 77, 256, 257, 640, 2048])
def test_product_is_that_of_rounded_activations(num_cols: int) -> None:
    for num_tokens, num_rows in [(1, 1), (1, 70), (2, 16), (3, 17), (5, 15), (8, 33), (65, 9)]:
        weight = weight_of(num_rows, num_cols)
        x = activations(num_tokens, num_cols)

        y = linear(x, weight)

        rounded = x.bfloat16().double().numpy()
        values = values_of(weight).astype(np.float64)
        error = np.abs(y.double().numpy() - rounded @ values.T)
        assert (error <= TOLERANCE * (np.abs(rounded) @ np.abs(values).T)).all()


def test_row_has_the_same_bits_alone_and_in_any_company() -> None:
    weight = weight_of(43, 600)
    x = activations(140, 600)
    set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1].clone(), weight) for i in range(140)])

    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)

        assert torch.equal(linear(x, weight), alone)
        assert torch.equal(linear(x[5:38].clone(), weight), alone[5:38])


def test_stacked_matrices_of_several_types_give_their_own_products() -> None:
    types = [GGMLType.BF16, GGMLType.Q8_0, GGMLType.F16, GGMLType.BF16]
    weights = [random_weight(type, 5 + 17 * i, 256, seed=i) for i, type in enumerate(types)]
    biases = [None, None, torch.ones(39), torch.arange(56.0)]
    x = activations(6, 256)

    y = stacked_linear(x, StackedWeights(weights, biases))

    parts = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(y, torch.cat(parts, dim=1))


def test_columns_and_rows_outside_of_the_matrix_are_not_read() -> None:
    weight = weight_of(19, 40)
    x = activations(9, 40)
    expected = linear(x, weight)
    buffer = torch.full((weight.data.numel() + 66,), 0xFF, dtype=torch.uint8)  # NaN
    buffer[1 : 1 + weight.data.numel()] = weight.data.flatten()
    moved = Weight(buffer[1 : 1 + weight.data.numel()].view(19, -1), GGMLType.BF16, 19, 40)

    assert torch.equal(linear(x, moved), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_activation_that_is_no_number_spoils_its_own_row_only(value: float) -> None:
    weight = weight_of(9, 256)
    x = activations(5, 256)
    expected = linear(x, weight)
    x[2, 100] = value

    y = linear(x, weight)

    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
