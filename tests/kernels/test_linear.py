"""Products with weights of every storage type against float64, and their independence of company.

The oracle of a weight is the gguf package. For quantised types two oracles bound the result: with
the activations as given, and with the activations rounded as linear's docstring says.
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
    reference,
    set_num_threads,
    stacked_linear,
)
from tests.kernels.weight_builders import (
    Doubles,
    constant_weight,
    quantized_activations,
    random_weight,
    values_of,
)

if HAS_EXT:
    from llmserve import _cpu_kernels

    INSTRUCTION_SETS = [s for s in _cpu_kernels.available_instruction_sets() if s != "avx512_bf16"]
else:
    INSTRUCTION_SETS = ["reference"]

needs_ext = pytest.mark.skipif(not HAS_EXT, reason="the reference does not round activations")

TYPES = list(GGMLType)
QUANTIZED = [type for type in TYPES if type.is_quantized]
FLOATS = [type for type in TYPES if not type.is_quantized]

# Error per output over the sum of the magnitudes of its terms, about twice the largest seen.
# Floats: chains of 32 additions, then of num_cols / 32, each good to 6e-8 of a partial sum.
# Quantised: a group of 32 is exact, then come one or two additions for each, and `magnitudes` is an
# upper bound.
TOLERANCE = dict.fromkeys(FLOATS, 5e-7) | dict.fromkeys(QUANTIZED, 4e-8)

# Rounding to 32,767 steps moves an activation by at most half a step, and a step by 2^-24.
HALF_STEP = 0.502 / 32767


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(request.param)
    yield request.param
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = get_num_threads()
    yield
    set_num_threads(before)


def activations(num_tokens: int, num_cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_cols, generator=generator)
    return x * torch.logspace(-3, 3, num_tokens)[:, None]


def magnitudes(x: Doubles, values: Doubles) -> Doubles:
    """Sums of the magnitudes of the terms, [num_tokens, num_rows].

    A weight may be the difference of two terms that are as large as the others of its group.
    """
    groups = values.reshape(len(values), -1, min(32, values.shape[1]))
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    spread = 2 * np.broadcast_to(largest, groups.shape).reshape(values.shape)
    return np.abs(x) @ spread.T


def assert_is_product(y: torch.Tensor, x: Doubles, weight: Weight) -> None:
    values = values_of(weight).astype(np.float64)
    error = np.abs(y.double().numpy() - x @ values.T)
    assert (error <= TOLERANCE[weight.type] * magnitudes(x, values)).all()


def shapes(type: GGMLType) -> list[tuple[int, int, int]]:
    """num_tokens, num_rows, num_cols."""
    cols = [c for c in (32, 64, 256, 320, 640, 2048) if c % type.block_len == 0]
    tokens = [1, 2, 3, 4, 5, 7, 8, 9, 15, 17, 31, 33, 64, 65]
    all_cols = [(tokens[i], 7, c) for i, c in enumerate(cols)]
    all_tokens = [(t, 3, cols[-2]) for t in tokens]
    return [*all_cols, *all_tokens, (3, 1, cols[-1]), (2, 640, cols[0]), (9, 641, cols[-2])]


@needs_ext
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_product_is_that_of_rounded_activations(type: GGMLType) -> None:
    for num_tokens, num_rows, num_cols in shapes(type):
        weight = random_weight(type, num_rows, num_cols)
        x = activations(num_tokens, num_cols)

        y = linear(x, weight)

        assert y.shape == (num_tokens, num_rows)
        assert_is_product(y, quantized_activations(x), weight)


@pytest.mark.parametrize("type", FLOATS, ids=lambda type: type.name)
def test_product_of_float_weights_rounds_nothing_first(type: GGMLType) -> None:
    for num_tokens, num_rows, num_cols in [*shapes(type), (5, 9, 1), (9, 7, 77), (2, 8, 71)]:
        weight = random_weight(type, num_rows, num_cols)
        x = activations(num_tokens, num_cols)

        y = linear(x, weight)

        values = values_of(weight).astype(np.float64)
        error = np.abs(y.double().numpy() - x.double().numpy() @ values.T)
        bound = np.abs(x.double().numpy()) @ np.abs(values).T
        assert (error <= TOLERANCE[type] * bound).all()


@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_rounding_activations_costs_at_most_half_a_step_each(type: GGMLType) -> None:
    weight = random_weight(type, 64, 1024)
    x = activations(16, 1024)

    y = linear(x, weight).double().numpy()

    values = values_of(weight).astype(np.float64)
    exact = x.double().numpy() @ values.T
    steps = x.abs().reshape(16, -1, 32).amax(dim=-1).repeat_interleave(32, dim=1).double().numpy()
    slack = TOLERANCE[type] * magnitudes(x.double().numpy(), values)
    assert (np.abs(y - exact) <= HALF_STEP * steps @ np.abs(values).T + slack).all()
    assert np.sqrt(((y - exact) ** 2).sum(1) / (exact**2).sum(1)).max() < 5e-5


@needs_ext
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_largest_numbers_do_not_overflow(type: GGMLType, byte: int) -> None:
    weight = constant_weight(type, byte, 9, 512)
    signs = torch.tensor([1.0, -1.0])[torch.arange(512) % 2]
    x = torch.stack([torch.ones(512), -torch.ones(512), signs, torch.cat([signs, -signs])[256:768]])

    y = linear(x, weight)

    assert_is_product(y, quantized_activations(x), weight)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_row_has_the_same_bits_alone_and_in_any_company(type: GGMLType, num_threads: None) -> None:
    weight = random_weight(type, 43, 512)
    x = activations(70, 512)
    set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1].clone(), weight) for i in range(70)])

    for threads in (1, 2, 3):
        set_num_threads(threads)

        assert torch.equal(linear(x, weight), alone)
        assert torch.equal(linear(x[:33].clone(), weight), alone[:33])
        assert torch.equal(linear(x[37:].clone(), weight), alone[37:])
        assert torch.equal(linear(x.flip(0).contiguous(), weight), alone.flip(0))
        assert torch.equal(linear(x[5:6].clone(), weight), alone[5:6])


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_output_does_not_depend_on_its_place_in_the_matrix(type: GGMLType) -> None:
    weight = random_weight(type, 43, 256)
    x = activations(9, 256)
    y = linear(x, weight)

    part = Weight(weight.data[5:22], type, 17, 256)

    assert torch.equal(linear(x, part), y[:, 5:22])


@needs_ext
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_instruction_sets_with_fused_multiply_add_give_equal_bits(
    type: GGMLType, instruction_set: str
) -> None:
    if instruction_set == "portable" or "avx2" not in INSTRUCTION_SETS:
        pytest.skip("the portable set rounds products before it adds them")
    weight = random_weight(type, 19, 768)
    x = activations(11, 768)
    y = linear(x, weight)

    _cpu_kernels.set_instruction_set("avx2")

    assert torch.equal(linear(x, weight), y)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_rows_may_start_at_any_byte(type: GGMLType) -> None:
    weight = random_weight(type, 11, 256)
    x = activations(3, 256)
    expected = linear(x, weight)
    size = weight.data.numel()

    for offset in (1, 2, 3):
        buffer = torch.zeros(size + offset, dtype=torch.uint8)
        buffer[offset:] = weight.data.flatten()
        moved = Weight(buffer[offset:].reshape(11, -1), type, 11, 256)

        assert torch.equal(linear(x, moved), expected)


def test_bytes_after_the_matrix_do_not_matter() -> None:
    for type in TYPES:
        weight = random_weight(type, 5, 256)
        x = activations(2, 256)
        expected = linear(x, weight)
        longer = torch.cat([weight.data, torch.full_like(weight.data, 0x7E)])

        assert torch.equal(linear(x, Weight(longer[:5], type, 5, 256)), expected)


def test_bias_is_added_and_out_is_filled() -> None:
    weight = random_weight(GGMLType.Q8_0, 13, 64)
    x = activations(5, 64)
    bias = torch.randn(13, generator=torch.Generator().manual_seed(1))
    out = torch.full((5, 13), torch.nan)

    result = linear(x, weight, bias, out)

    assert result is out
    assert torch.equal(out, linear(x, weight) + bias)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 70])
def test_stacked_matrices_give_their_products_side_by_side(num_tokens: int) -> None:
    types = [GGMLType.Q8_0, GGMLType.BF16, GGMLType.Q4_K, GGMLType.Q8_0]
    weights = [random_weight(type, 5 + 17 * i, 256, seed=i) for i, type in enumerate(types)]
    biases = [None, torch.full((22,), 3.0), None, torch.arange(56.0)]
    x = activations(num_tokens, 256)

    y = stacked_linear(x, StackedWeights(weights, biases))

    parts = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(y, torch.cat(parts, dim=1))


def test_matrices_of_other_columns_do_not_stack() -> None:
    weights = [random_weight(GGMLType.Q8_0, 4, 64), random_weight(GGMLType.Q8_0, 4, 96)]

    with pytest.raises(ValueError, match="96 columns do not stack on 64"):
        StackedWeights(weights, [None, None])


def test_no_tokens_give_no_rows() -> None:
    for type in (GGMLType.F32, GGMLType.Q4_K):
        assert linear(torch.empty(0, 256), random_weight(type, 3, 256)).shape == (0, 3)


@pytest.mark.parametrize("type", [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_activation_that_is_no_number_spoils_its_own_row_only(type: GGMLType, value: float) -> None:
    weight = random_weight(type, 9, 256)
    x = activations(5, 256)
    expected = linear(x, weight)
    x[2, 100] = value

    y = linear(x, weight)

    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_zero_and_vanishing_activations_give_zero(type: GGMLType) -> None:
    weight = random_weight(type, 9, 256)
    x = torch.zeros(2, 256)
    x[1] = 1e-42

    y = linear(x, weight)

    assert (y[0] == 0).all()
    assert y[1].abs().max() < 1e-37


@needs_ext
def test_wrong_arguments_are_refused() -> None:
    weight = random_weight(GGMLType.Q8_0, 4, 64)
    x = activations(2, 64)

    with pytest.raises(ValueError, match="x must have the shape"):
        linear(x[0], weight)
    with pytest.raises(ValueError, match=r"x must be contiguous torch.float32 of shape \(2, 64\)"):
        linear(x.double(), weight)
    with pytest.raises(ValueError, match="x must be contiguous"):
        linear(activations(2, 96), weight)
    with pytest.raises(ValueError, match="x must be contiguous"):
        linear(activations(64, 2).T, weight)
    with pytest.raises(ValueError, match="bias must be"):
        linear(x, weight, torch.zeros(5))
    with pytest.raises(ValueError, match="out must be"):
        linear(x, weight, None, torch.empty(4, 2))
    with pytest.raises(ValueError, match=r"weight\.data must be"):
        linear(x, Weight(torch.zeros(4, 136, dtype=torch.uint8)[:, ::2], GGMLType.Q8_0, 4, 64))


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_reference_agrees(type: GGMLType) -> None:
    weight = random_weight(type, 33, 512)
    x = activations(7, 512)

    y = linear(x, weight)

    expected = reference.linear(x, weight)
    limit = 0.05 if type.is_quantized else 1e-5
    assert ((y - expected).abs().amax(dim=1) <= limit * expected.abs().amax(dim=1)).all()
