"""Products and rows of matrices in every storage format, against float64.

The oracle of a GGUF type is the gguf package, that of other formats packed_weight.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmserve.errors import StartupError
from llmserve.kernels import GGMLType, Weight
from llmserve.kernels.cuda.linear import (
    DeviceWeights,
    dequantize,
    embedding,
    max_kernel_tokens,
    stacked_linear,
    upload,
)
from llmserve.kernels.cuda.packing import DeviceMatrix
from llmserve.kernels.packed_weight import FP8Weight, Int8Weight, PackedWeight
from tests.kernels.packed_builders import random_awq, random_fp8, random_gptq, random_int8
from tests.kernels.weight_builders import constant_weight, random_weight, values_of

TYPES = list(GGMLType)
QUANTIZED = [type for type in TYPES if type.is_quantized]
HALVES = [torch.bfloat16, torch.float16]

# Formats of other quantisation methods, by what makes a matrix of rows and columns.
PACKED: dict[str, Any] = {
    "awq-128": lambda rows, cols: random_awq(rows, cols, 128),
    "awq-32": lambda rows, cols: random_awq(rows, cols, 32),
    "gptq-row": lambda rows, cols: random_gptq(rows, cols, cols),
    "gptq-act-order": lambda rows, cols: random_gptq(rows, cols, 128, has_act_order=True),
    "int8-row": lambda rows, cols: random_int8(rows, cols, cols),
    "int8-128": lambda rows, cols: random_int8(rows, cols, 128),
    "int8-32": lambda rows, cols: random_int8(rows, cols, 32),
    "fp8-tensor": lambda rows, cols: random_fp8(rows, cols),
    "fp8-row": lambda rows, cols: random_fp8(rows, cols, has_row_scales=True),
    "fp8-tiles": lambda rows, cols: random_fp8(rows, cols, block=(16, 128)),
}

# Error of an output over the sum of the magnitudes of its terms. The largest seen is 4e-8 where the
# emulator sums; tensor cores cut bits off while they sum.
TOLERANCE = 2e-6
ROUNDING = {torch.float32: 1e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def place(weight: Weight | PackedWeight, device: torch.device) -> DeviceMatrix:
    return upload(weight, device, lambda target, source: target.copy_(source))


def doubles(weight: Weight | PackedWeight) -> torch.Tensor:
    if isinstance(weight, Weight):
        return torch.from_numpy(values_of(weight)).double()
    return weight.dequantize().double()


def activations(num_tokens: int, num_cols: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_cols, generator=generator).to(dtype)


def check_product(
    module: Any,
    device: torch.device,
    weights: list[Weight | PackedWeight],
    x: torch.Tensor,
    biases: list[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product, compared with float64."""
    biases = biases or [None] * len(weights)
    stacked = DeviceWeights(
        [place(weight, device) for weight in weights],
        [None if bias is None else bias.to(device) for bias in biases],
    )
    out = None
    if out_dtype is not None:
        out = torch.empty(len(x), stacked.num_rows, dtype=out_dtype, device=device)

    result = stacked_linear(module, x.to(device), stacked, out)

    values = torch.cat([doubles(weight) for weight in weights])
    bias = torch.cat(
        [
            torch.zeros(weight.num_rows) if own is None else own
            for weight, own in zip(weights, biases, strict=True)
        ]
    ).double()
    expected = x.double() @ values.T + bias
    magnitudes = x.double().abs() @ values.abs().T + bias.abs()
    limit = TOLERANCE * magnitudes + ROUNDING[result.dtype] * expected.abs() + 1e-7
    error = (result.cpu().double() - expected).abs()
    assert bool((error <= limit).all()), f"{float((error / magnitudes.clamp(min=1e-9)).max()):.2e}"
    return result


@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_values_have_the_bits_of_the_gguf_package(
    cuda_module: Any, device: torch.device, type: GGMLType
) -> None:
    for num_rows, num_cols in [(1, 256), (5, 768)]:
        weight = random_weight(type, num_rows, num_cols)

        values = dequantize(cuda_module, place(weight, device))

        assert torch.equal(values.cpu(), torch.from_numpy(values_of(weight)))


@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_extreme_blocks_have_the_values_of_the_gguf_package(
    cuda_module: Any, device: torch.device, type: GGMLType
) -> None:
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        weight = constant_weight(type, byte, 2, 256)

        values = dequantize(cuda_module, place(weight, device))

        assert torch.equal(values.cpu(), torch.from_numpy(values_of(weight)))


@pytest.mark.parametrize("num_cols", [32, 96, 160])
def test_rows_of_few_groups_have_their_values(
    cuda_module: Any, device: torch.device, num_cols: int
) -> None:
    for type in (t for t in QUANTIZED if t.block_len == 32):
        weight = random_weight(type, 3, num_cols)

        values = dequantize(cuda_module, place(weight, device))

        assert torch.equal(values.cpu(), torch.from_numpy(values_of(weight)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_are_rounded_once(cuda_module: Any, device: torch.device, dtype: torch.dtype) -> None:
    for type in (GGMLType.Q4_K, GGMLType.Q6_K):
        weight = random_weight(type, 3, 256)

        values = dequantize(cuda_module, place(weight, device), dtype)

        assert torch.equal(values.cpu(), torch.from_numpy(values_of(weight)).to(dtype))


@pytest.mark.parametrize("name", PACKED)
def test_packed_checkpoints_have_the_values_of_their_reference(
    cuda_module: Any, device: torch.device, name: str
) -> None:
    weight = PACKED[name](24, 384)

    values = dequantize(cuda_module, place(weight, device))

    torch.testing.assert_close(values.cpu(), weight.dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_embedding_gives_the_rows_of_the_ids(
    cuda_module: Any, device: torch.device, type: GGMLType
) -> None:
    weight = random_weight(type, 20, 256)
    token_ids = torch.tensor([19, 0, 7, 7])

    rows = embedding(cuda_module, token_ids.to(device), place(weight, device))

    assert torch.equal(rows.cpu(), torch.from_numpy(values_of(weight))[token_ids])


def test_embedding_of_a_foreign_id_is_zeros(cuda_module: Any, device: torch.device) -> None:
    matrix = place(random_weight(GGMLType.Q8_0, 5, 64), device)

    rows = embedding(cuda_module, torch.tensor([-1, 5, 1 << 40], device=device), matrix)

    assert not rows.cpu().any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_products_of_quantised_matrices(
    cuda_module: Any, device: torch.device, type: GGMLType, dtype: torch.dtype
) -> None:
    for num_rows, num_cols, num_tokens in [(1, 256, 1), (17, 512, 5), (33, 768, 10)]:
        weight = random_weight(type, num_rows, num_cols, seed=num_rows)

        check_product(cuda_module, device, [weight], activations(num_tokens, num_cols, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_products_of_packed_checkpoints(
    cuda_module: Any, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    weight = PACKED[name](24, 384)

    for num_tokens in (3, 9):
        check_product(cuda_module, device, [weight], activations(num_tokens, 384, dtype))


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_products_of_float32_activations(
    cuda_module: Any, device: torch.device, type: GGMLType
) -> None:
    for num_rows, num_cols, num_tokens in [(1, 256, 1), (19, 1280, 6)]:
        weight = random_weight(type, num_rows, num_cols)

        check_product(
            cuda_module, device, [weight], activations(num_tokens, num_cols, torch.float32)
        )


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("type", [t for t in TYPES if not t.is_quantized], ids=lambda t: t.name)
def test_products_of_float_matrices_of_any_type(
    cuda_module: Any, device: torch.device, type: GGMLType, dtype: torch.dtype
) -> None:
    for num_rows, num_cols, num_tokens in [(3, 8, 1), (18, 328, 8), (70, 1032, 2)]:
        weight = random_weight(type, num_rows, num_cols)

        check_product(cuda_module, device, [weight], activations(num_tokens, num_cols, dtype))


@pytest.mark.parametrize("num_cols", [32, 96, 416])
def test_columns_need_not_fill_a_chunk(
    cuda_module: Any, device: torch.device, num_cols: int
) -> None:
    for type in (t for t in QUANTIZED if t.block_len == 32):
        weight = random_weight(type, 9, num_cols)

        check_product(cuda_module, device, [weight], activations(2, num_cols, torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32])
def test_more_tokens_take_more_passes_over_the_matrix(
    cuda_module: Any, device: torch.device, num_tokens: int
) -> None:
    for type in (GGMLType.Q4_0, GGMLType.Q5_1):
        weight = random_weight(type, 18, 160)

        check_product(cuda_module, device, [weight], activations(num_tokens, 160, torch.float16))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_many_tokens_are_multiplied_by_torch(
    cuda_module: Any, device: torch.device, dtype: torch.dtype
) -> None:
    x = activations(40, 256, dtype)
    parts = [random_weight(type, 12, 256) for type in (GGMLType.Q4_K, GGMLType.F32, GGMLType.F16)]
    bias = torch.ones(12, device=device)
    stacked = DeviceWeights([place(part, device) for part in parts], [None, bias, None])

    result = stacked_linear(cuda_module, x.to(device), stacked)

    # torch multiplies with weights of the activations' type.
    values = torch.cat([doubles(part).to(dtype).double() for part in parts])
    expected = x.double() @ values.T
    expected[:, 12:24] += 1
    magnitudes = x.double().abs() @ values.abs().T + 1
    error = (result.cpu().double() - expected).abs()
    assert bool((error <= (TOLERANCE + 2 * ROUNDING[dtype]) * magnitudes).all())


def test_float_columns_of_any_number_are_multiplied_by_torch(
    cuda_module: Any, device: torch.device
) -> None:
    for num_cols in (1, 5, 77):
        weight = random_weight(GGMLType.F32, 3, num_cols)

        check_product(cuda_module, device, [weight], activations(2, num_cols, torch.float32))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stacked_parts_of_different_types_with_biases(
    cuda_module: Any, device: torch.device, out_dtype: torch.dtype
) -> None:
    parts: list[Weight | PackedWeight] = [
        random_weight(GGMLType.Q4_K, 20, 256),
        random_weight(GGMLType.Q6_K, 3, 256),
        random_weight(GGMLType.Q4_K, 17, 256, seed=5),
        random_weight(GGMLType.BF16, 5, 256),
        random_gptq(16, 256, 128, has_act_order=True),
    ]
    biases = [torch.linspace(-2, 2, part.num_rows) for part in parts]
    x = activations(3, 256, torch.bfloat16)

    check_product(cuda_module, device, parts, x, [*biases[:2], None, *biases[3:]], out_dtype)


def test_more_parts_than_a_launch_takes(cuda_module: Any, device: torch.device) -> None:
    parts = [random_weight(GGMLType.Q4_0, 1 + i, 64, seed=i) for i in range(9)]

    check_product(cuda_module, device, list(parts), activations(1, 64, torch.float16))


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q3_K, GGMLType.Q8_0, GGMLType.BF16])
def test_a_token_has_the_same_bits_in_any_company(
    cuda_module: Any, device: torch.device, type: GGMLType
) -> None:
    weights = DeviceWeights([place(random_weight(type, 20, 512), device)], [None])
    most = weights.max_kernel_tokens[torch.bfloat16]
    x = activations(most, 512, torch.bfloat16).to(device)
    together = stacked_linear(cuda_module, x, weights)

    for num_tokens in {1, 7, min(9, most)}:
        some = stacked_linear(cuda_module, x[-num_tokens:].contiguous(), weights)

        assert torch.equal(some, together[-num_tokens:])


def test_no_tokens_give_no_rows(cuda_module: Any, device: torch.device) -> None:
    weights = DeviceWeights([place(random_weight(GGMLType.Q4_0, 5, 64), device)], [None])

    out = stacked_linear(cuda_module, torch.empty(0, 64, device=device), weights)

    assert out.shape == (0, 5)


def test_infinite_and_nan_activations_stay_with_their_token(
    cuda_module: Any, device: torch.device
) -> None:
    x = activations(3, 256, torch.bfloat16)
    x[1, 7] = float("nan")
    weights = DeviceWeights([place(random_weight(GGMLType.Q4_K, 5, 256), device)], [None])

    result = stacked_linear(cuda_module, x.to(device), weights).cpu()

    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_wrong_inputs_are_refused(cuda_module: Any, device: torch.device) -> None:
    matrix = place(random_weight(GGMLType.Q4_0, 5, 64), device)
    weights = DeviceWeights([matrix], [None])
    x = torch.ones(2, 64, device=device)

    with pytest.raises(ValueError, match="x must be contiguous"):
        stacked_linear(cuda_module, x[:, :32], weights)
    with pytest.raises(ValueError, match="x must be of floats"):
        stacked_linear(cuda_module, x.long(), weights)
    with pytest.raises(ValueError, match="out must be of"):
        stacked_linear(cuda_module, x, weights, torch.empty(2, 5, dtype=torch.float16))
    with pytest.raises(ValueError, match="do not stack"):
        DeviceWeights([matrix, place(random_weight(GGMLType.Q4_0, 5, 32), device)], [None, None])
    with pytest.raises(ValueError, match="bias must be"):
        DeviceWeights([matrix], [torch.ones(4, device=device)])


def test_repacked_matrices_take_hardly_more_bytes(device: torch.device) -> None:
    for type in QUANTIZED:
        weight = random_weight(type, 8, 1024)

        assert place(weight, device).num_bytes <= 1.02 * weight.data.numel()


def test_limits_of_tokens_follow_from_the_format(device: torch.device) -> None:
    limits = {
        type: max_kernel_tokens(place(random_weight(type, 1, 256), device), torch.bfloat16)
        for type in (GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_K)
    }

    assert list(limits.values()) == [8, 16, 32]
    odd = place(random_weight(GGMLType.F16, 1, 12), device)
    assert max_kernel_tokens(odd, torch.float16) == 0


def test_groups_that_no_format_holds_are_refused(device: torch.device) -> None:
    scales = torch.ones(4, 4)
    codes = torch.zeros(4, 64, dtype=torch.int8)

    with pytest.raises(StartupError, match="groups of 16 columns"):
        place(Int8Weight(codes, scales), device)
    floats = torch.from_numpy(np.zeros((4, 64), np.uint8)).view(torch.float8_e4m3fn)
    with pytest.raises(StartupError, match="tiles of 64 columns"):
        place(FP8Weight(floats, torch.ones(1, 1), (4, 64)), device)
