"""Norm, rotary embedding, gated activation and soft-cap against torch in float64 and against
transformers, and their independence of other rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from llmserve.kernels import (
    HAS_EXT,
    act_mul,
    add_rms_norm,
    get_num_threads,
    rms_norm,
    rotary,
    set_num_threads,
    softcap,
)

if HAS_EXT:
    from llmserve import _cpu_kernels

    INSTRUCTION_SETS = [s for s in _cpu_kernels.available_instruction_sets() if "avx512" not in s]
else:
    INSTRUCTION_SETS = ["reference"]

# Largest relative error, and absolute error where a result may come out near zero.
TOLERANCE = {
    # float32 sums of squares in 32 parallel sums, then three roundings.
    "norm": {"rtol": 1e-6, "atol": 1e-7},
    # Two products and a sum of numbers of order 1.
    "rotary": {"rtol": 0.0, "atol": 5e-7},
    # exp to 1e-7 with an argument up to 100 whose own rounding counts 100 times. torch's float64
    # GELU of negative numbers cancels, so its tail is not the better one.
    "activation": {"rtol": 1e-5, "atol": 1e-14},
    # cap times a tanh good to 1e-7.
    "softcap": {"rtol": 3e-7, "atol": 0.0},
}

SIZES = [1, 7, 8, 20, 33, 256, 640, 2049]


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(request.param)
    torch.manual_seed(0)
    yield
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


def assert_close(kind: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCE[kind])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_equals_torch_in_float64(size: int, weight_offset: float) -> None:
    x, weight = torch.randn(5, size) * 3, torch.randn(size)
    expected = F.rms_norm(x.double(), (size,), weight.double() + weight_offset, 1e-6)

    assert_close("norm", rms_norm(x, weight, 1e-6, weight_offset=weight_offset), expected)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e15])
def test_rms_norm_takes_eps_into_account_and_survives_large_values(scale: float) -> None:
    x, weight = torch.randn(3, 64) * scale, torch.ones(64)
    expected = F.rms_norm(x.double(), (64,), None, 1e-5)

    assert_close("norm", rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_equals_the_modules_of_transformers() -> None:
    x, weight = torch.randn(4, 640), torch.randn(640)
    for module, offset in ((LlamaRMSNorm(640, 1e-6), 0.0), (Gemma3RMSNorm(640, 1e-6), 1.0)):
        module.weight.data = weight
        result = rms_norm(x, weight, 1e-6, weight_offset=offset)
        torch.testing.assert_close(result, module(x).detach(), rtol=2e-6, atol=1e-6)


def test_rms_norm_of_heads_in_a_fused_projection_may_run_in_place() -> None:
    fused = torch.randn(6, 8 * 32)
    before = fused.clone()
    heads, weight = fused[:, 64:192].view(6, 4, 32), torch.randn(32)
    expected = F.rms_norm(heads.double(), (32,), weight.double(), 1e-6)

    assert rms_norm(heads, weight, 1e-6, out=heads) is heads
    assert_close("norm", heads, expected)
    assert torch.equal(fused[:, :64], before[:, :64])
    assert torch.equal(fused[:, 192:], before[:, 192:])


def test_rms_norm_of_one_row() -> None:
    x, weight = torch.randn(64), torch.randn(64)

    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x[None], weight, 1e-6)[0])


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_adds_to_the_residual_in_place(size: int) -> None:
    x, residual, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    total = x + residual
    expected = F.rms_norm(total.double(), (size,), weight.double() + 1.0, 1e-6)
    result = add_rms_norm(x, residual, weight, 1e-6, weight_offset=1.0)

    assert torch.equal(residual, total)
    assert_close("norm", result, expected)


def test_add_rms_norm_may_write_to_its_input() -> None:
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    expected = add_rms_norm(x, residual.clone(), weight, 1e-6)

    assert torch.equal(add_rms_norm(x, residual, weight, 1e-6, out=x), expected)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(256, 256), (128, 128), (80, 32), (64, 16), (20, 20), (6, 2)]
)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64], ids=str)
def test_rotary_turns_halves_as_transformers_does(
    head_dim: int, rotary_dim: int, position_dtype: torch.dtype
) -> None:
    q, k = torch.randn(7, 4, head_dim), torch.randn(7, 2, head_dim)
    angles = torch.arange(50.0).outer(torch.rand(rotary_dim // 2))
    positions = torch.tensor([0, 49, 3, 3, 17, 1, 30], dtype=position_dtype)
    whole = torch.cat([angles, angles], dim=-1)[positions].double()
    cos, sin = angles.cos(), angles.sin()
    cos_rows, sin_rows = (
        torch.cat([t, t], dim=-1)[positions].double().unsqueeze(0) for t in (cos, sin)
    )
    assert whole.shape == cos_rows.shape[1:]
    expected = apply_rotary_pos_emb(
        q[..., :rotary_dim].double().transpose(0, 1).unsqueeze(0),
        k[..., :rotary_dim].double().transpose(0, 1).unsqueeze(0),
        cos_rows,
        sin_rows,
    )
    rests = q[..., rotary_dim:].clone(), k[..., rotary_dim:].clone()
    rotary(q, k, positions, cos, sin)

    for x, turned, rest in zip((q, k), expected, rests, strict=True):
        assert_close("rotary", x[..., :rotary_dim], turned[0].transpose(0, 1))
        assert torch.equal(x[..., rotary_dim:], rest)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 32), (20, 20)])
def test_interleaved_rotary_multiplies_complex_numbers(head_dim: int, rotary_dim: int) -> None:
    q, k = torch.randn(5, 3, head_dim), torch.randn(5, 1, head_dim)
    angles = torch.arange(9.0).outer(torch.rand(rotary_dim // 2))
    positions = torch.tensor([8, 0, 1, 7, 7])
    before = q.clone()
    numbers = torch.view_as_complex(q[..., :rotary_dim].double().unflatten(-1, (-1, 2)))
    cos, sin = angles.cos(), angles.sin()
    turns = torch.complex(cos.double(), sin.double())[positions].unsqueeze(1)
    expected = torch.view_as_real(numbers * turns).flatten(-2)
    rotary(q, k, positions, cos, sin, is_interleaved=True)

    assert_close("rotary", q[..., :rotary_dim], expected)
    assert torch.equal(q[..., rotary_dim:], before[..., rotary_dim:])


def test_rotary_of_parts_of_a_fused_projection_leaves_the_rest() -> None:
    fused = torch.randn(4, 8 * 16)
    before = fused.clone()
    q, k = fused[:, :64].view(4, 4, 16), fused[:, 64:96].view(4, 2, 16)
    expected_q, expected_k = q.clone(), k.clone()
    angles = torch.rand(10, 8)
    positions = torch.arange(4)
    rotary(expected_q, expected_k, positions, angles.cos(), angles.sin())
    rotary(q, k, positions, angles.cos(), angles.sin())

    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)
    assert torch.equal(fused[:, 96:], before[:, 96:])


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("size", [1, 8, 19, 4099])
def test_act_mul_equals_torch_in_float64(activation: str, size: int) -> None:
    gate, up = torch.randn(3, size) * 4, torch.randn(3, size)
    expected = activate(activation, gate.double()) * up.double()
    result = act_mul(torch.cat([gate, up], dim=1), activation)

    assert_close("activation", result, expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activation_of_extreme_values(activation: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 1e-30, 90.0, 1e30, float("nan")]])
    result = act_mul(torch.cat([gate, torch.ones(1, 9)], dim=1), activation)[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 5e-31, 90.0, 1e30])

    torch.testing.assert_close(result[:8], expected, rtol=1e-6, atol=1e-8)
    assert result[8].isnan()


def test_act_mul_of_strided_rows() -> None:
    wide = torch.randn(4, 100)

    assert torch.equal(act_mul(wide[:, 10:70], "silu"), act_mul(wide[:, 10:70].clone(), "silu"))


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_softcap_equals_tanh_in_float64(cap: float) -> None:
    x = torch.cat([torch.randn(1001) * cap, torch.randn(1001) * 1e-4, torch.randn(10) * 1e6])
    expected = cap * torch.tanh(x.double() / cap)

    assert softcap(x, cap) is x
    assert_close("softcap", x, expected)


def test_softcap_keeps_signs_of_infinity_and_nan() -> None:
    x = softcap(torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0]), 30.0)

    assert x[:2].tolist() == [30.0, -30.0]
    assert x[2].isnan()
    assert x[3] == 0.0


@pytest.mark.parametrize("size", [37, 640])
def test_row_has_the_same_bits_alone_or_among_others(size: int, num_threads: int) -> None:
    x, weight, residual = torch.randn(300, size), torch.randn(size), torch.randn(300, size)
    alone = slice(123, 124)
    heads = x.view(300, 1, size)
    angles = torch.rand(300, size // 2)
    turned = x.clone().view(300, 1, size)
    positions = torch.arange(300)
    rotary(turned, heads.clone(), positions, angles.cos(), angles.sin())
    row = heads[alone].clone()
    rotary(row, row.clone(), positions[alone], angles.cos(), angles.sin())
    summed = add_rms_norm(x, residual.clone(), weight, 1e-6)
    gate_up = torch.cat([x, residual], dim=1)
    capped = softcap(x.clone(), 5.0)

    assert torch.equal(rms_norm(x[alone], weight, 1e-6), rms_norm(x, weight, 1e-6)[alone])
    assert torch.equal(add_rms_norm(x[alone], residual[alone].clone(), weight, 1e-6), summed[alone])
    assert torch.equal(row, turned[alone])
    assert torch.equal(act_mul(gate_up[alone], "gelu"), act_mul(gate_up, "gelu")[alone])
    assert torch.equal(softcap(x[alone].clone(), 5.0), capped[alone])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = torch.randn(400, 1000), torch.randn(1000)
    before = get_num_threads()
    results = []
    for n in (1, 2, 5):
        set_num_threads(n)
        results.append((rms_norm(x, weight, 1e-6), act_mul(x, "silu"), softcap(x.clone(), 2.0)))
    set_num_threads(before)

    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_empty_batches_give_no_rows() -> None:
    none = torch.empty(0, 4, 16)
    rotary(none, none, torch.empty(0).long(), torch.ones(3, 8), torch.ones(3, 8))

    assert rms_norm(torch.empty(0, 64), torch.ones(64), 1e-6).shape == (0, 64)
    assert act_mul(torch.empty(0, 64), "silu").shape == (0, 32)
    assert softcap(torch.empty(0, 64), 2.0).shape == (0, 64)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'relu'"):
        act_mul(torch.zeros(1, 8), "relu")


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
def test_unfit_tensors_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    heads, table, positions = torch.zeros(2, 3, 8), torch.zeros(5, 4), torch.zeros(2).int()
    calls = [
        (lambda: rms_norm(x.half(), weight, 1e-6), "x must be float32"),
        (lambda: rms_norm(x.view(1, 1, 2, 8), weight, 1e-6), "x must be float32 of 1 to 3"),
        (lambda: rms_norm(x.T, torch.zeros(2), 1e-6), "adjacent elements"),
        (lambda: rms_norm(x, torch.zeros(7), 1e-6), "weight must be"),
        (lambda: rms_norm(x, weight.double(), 1e-6), "weight must be"),
        (lambda: rms_norm(x, weight, 1e-6, out=torch.zeros(3, 8)), "out must have the shape"),
        (lambda: add_rms_norm(x, torch.zeros(1, 8), weight, 1e-6), "residual must have the shape"),
        (lambda: rotary(x, heads, positions, table, table), "q and k must have the shape"),
        (lambda: rotary(heads, heads[:1], positions, table, table), "q and k must have"),
        (lambda: rotary(heads, heads, positions[:1], table, table), "positions must be"),
        (lambda: rotary(heads, heads, positions.float(), table, table), "positions must be"),
        (lambda: rotary(heads, heads, positions, table.double(), table), "cos must be"),
        (lambda: rotary(heads, heads, positions, table, table.T), "sin must be"),
        (lambda: rotary(heads, heads, positions, table, table[:3]), "do not fit heads"),
        (lambda: rotary(heads, heads, positions, *[torch.zeros(5, 5)] * 2), "do not fit heads"),
        (lambda: act_mul(torch.zeros(2, 7), "silu"), "gate_up must have the shape"),
        (lambda: act_mul(x, "silu", torch.zeros(2, 8)), "out must be contiguous"),
        (lambda: softcap(x.T, 1.0), "x must be contiguous"),
        (lambda: softcap(x, 0.0), "cap is 0.0"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
@pytest.mark.parametrize("position", [-1, 5])
def test_position_outside_the_tables_is_refused_and_nothing_turned(position: int) -> None:
    heads = torch.ones(2, 3, 8)

    with pytest.raises(IndexError, match=f"position {position} of token 1"):
        rotary(heads, heads, torch.tensor([0, position]), torch.zeros(5, 4), torch.zeros(5, 4))
    assert (heads == 1).all()
