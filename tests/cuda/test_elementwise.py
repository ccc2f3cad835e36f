"""Norm and residual, activation, embedding, soft-cap, bias and copies against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from llmserve.kernels import NormParameters
from llmserve.kernels.cuda import elementwise

ACT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sizes that fill vectors, leave some empty, and need several rounds of a block of 512 threads.
SIZES = [1, 7, 64, 100, 640, 4104, 8197, 8200]

# Half a unit in the last place of the result, and what float32 arithmetic adds before.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11 + 2e-6, torch.bfloat16: 2**-8 + 2e-6}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-6) -> None:
    """expected: float64."""
    torch.testing.assert_close(
        actual.double(), expected, rtol=ROUNDING[actual.dtype], atol=atol, check_device=False
    )


def normalize(x: torch.Tensor, norm: NormParameters | None) -> torch.Tensor:
    """In float64."""
    x = x.double()
    if norm is None:
        return x
    return F.rms_norm(x, x.shape[-1:], norm.weight.double() + norm.weight_offset, norm.eps)


def make_norm(size: int, device: torch.device, offset: float = 0.0) -> NormParameters:
    return NormParameters(torch.randn(size, device=device), 1e-6, offset)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", ACT_DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_of_activations_and_of_the_residual_stream(
    cuda_module: Any, device: torch.device, size: int, dtype: torch.dtype
) -> None:
    norm = make_norm(size, device, offset=1.0)
    x = (torch.randn(3, size, device=device) * 3).to(dtype)
    residual = torch.randn(3, size, device=device)

    assert_close(elementwise.rms_norm(cuda_module, x, norm), normalize(x, norm))
    from_residual = elementwise.rms_norm(cuda_module, residual, norm, out_dtype=dtype)
    assert from_residual.dtype == dtype
    assert_close(from_residual, normalize(residual, norm))


@pytest.mark.parametrize("scale", [1e-12, 1e15])
def test_rms_norm_takes_eps_into_account_and_survives_large_values(
    cuda_module: Any, device: torch.device, scale: float
) -> None:
    x = torch.randn(2, 64, device=device) * scale
    norm = NormParameters(torch.ones(64, device=device), 1e-5, 0.0)

    assert_close(elementwise.rms_norm(cuda_module, x, norm), normalize(x, norm), atol=1e-14)


@pytest.mark.parametrize(("first", "head_dim"), [(64, 32), (3, 20)])
def test_rms_norm_of_heads_in_a_fused_projection_may_run_in_place(
    cuda_module: Any, device: torch.device, first: int, head_dim: int
) -> None:
    fused = torch.randn(6, 300, device=device).to(torch.bfloat16)
    before = fused.clone()
    end = first + 4 * head_dim
    heads = fused[:, first:end].view(6, 4, head_dim)
    norm = make_norm(head_dim, device)
    expected = normalize(heads, norm)

    assert elementwise.rms_norm(cuda_module, heads, norm, out=heads) is heads
    assert_close(heads, expected)
    assert torch.equal(fused[:, :first], before[:, :first])
    assert torch.equal(fused[:, end:], before[:, end:])


@pytest.mark.parametrize("dtype", ACT_DTYPES, ids=str)
@pytest.mark.parametrize("size", [20, 640])
@pytest.mark.parametrize("norms", ["", "post", "pre", "post pre"])
def test_add_norm_is_a_step_of_the_residual_stream(
    cuda_module: Any, device: torch.device, norms: str, size: int, dtype: torch.dtype
) -> None:
    post = make_norm(size, device, 1.0) if "post" in norms else None
    pre = make_norm(size, device, 1.0) if "pre" in norms else None
    x = torch.randn(5, size, device=device).to(dtype)
    residual = torch.randn(5, size, device=device) * 2
    total = residual.double() + 0.22 * normalize(x, post)
    expected = normalize(total, pre)

    result = elementwise.add_norm(cuda_module, x, residual, post=post, norm=pre, scale=0.22)

    assert result is x
    assert_close(residual, total)
    assert_close(result, expected, atol=4e-6)


def test_add_norm_keeps_float32_products_and_gives_activations(
    cuda_module: Any, device: torch.device
) -> None:
    x, residual = torch.randn(2, 96, device=device), torch.randn(2, 96, device=device)
    norm, out = make_norm(96, device), torch.empty(2, 96, dtype=torch.bfloat16, device=device)
    total = residual.double() + x.double()

    elementwise.add_norm(cuda_module, x, residual, norm=norm, out=out)

    assert_close(residual, total)
    assert_close(out, normalize(total, norm))


def test_a_row_has_the_same_bits_alone_and_among_others(
    cuda_module: Any, device: torch.device
) -> None:
    x, norm = torch.randn(9, 1000, device=device), make_norm(1000, device)

    together = elementwise.rms_norm(cuda_module, x, norm)

    alone = [elementwise.rms_norm(cuda_module, row[None], norm) for row in x]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", ACT_DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [5, 64, 2056])
def test_act_mul(
    cuda_module: Any, device: torch.device, activation: str, size: int, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(3, 2 * size + 8, device=device) * 4).to(dtype)[:, : 2 * size]
    gate, up = gate_up.double().split(size, dim=1)
    if activation == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")

    result = elementwise.act_mul(cuda_module, gate_up, activation)

    assert result.dtype == dtype
    assert_close(result, activated * up, atol=1e-5)


def test_act_mul_survives_the_ends_of_the_range(cuda_module: Any, device: torch.device) -> None:
    gate = torch.tensor([[-1e30, -100.0, -20.0, 20.0, 100.0, 1e30]], device=device)
    gate_up = torch.cat([gate, torch.ones_like(gate)], 1)

    for activation in ("silu", "gelu", "gelu_tanh"):
        result = elementwise.act_mul(cuda_module, gate_up, activation)
        assert_close(result, gate.double().clamp(min=0), atol=1e-6)


@pytest.mark.parametrize("dtype", ACT_DTYPES, ids=str)
@pytest.mark.parametrize("size", [9, 640, 2056])
def test_embedding_scales_rows_and_gives_zeros_for_ids_outside(
    cuda_module: Any, device: torch.device, size: int, dtype: torch.dtype
) -> None:
    table = torch.randn(50, size, device=device).to(dtype)
    ids = torch.tensor([3, 49, 0, 3, -1, 50], device=device)
    expected = table[ids.clamp(0, 49)].double() * 1.5
    expected[4:] = 0

    result = elementwise.embedding(cuda_module, ids, table, 1.5)

    assert result.dtype == torch.float32
    assert_close(result, expected)


@pytest.mark.parametrize("count", [1, 8, 2051])
def test_softcap(cuda_module: Any, device: torch.device, count: int) -> None:
    x = torch.randn(count, device=device) * 60
    expected = 30 * torch.tanh(x.double() / 30)

    assert elementwise.softcap(cuda_module, x, 30.0) is x
    assert_close(x, expected)


@pytest.mark.parametrize("dtype", ACT_DTYPES, ids=str)
@pytest.mark.parametrize("size", [11, 640])
def test_add_bias(cuda_module: Any, device: torch.device, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, size, device=device).to(dtype)
    bias = torch.randn(size, device=device)
    expected = x.double() + bias.double()

    assert elementwise.add_bias(cuda_module, x, bias) is x
    assert_close(x, expected)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 40), (torch.float32, 7)])
def test_gather_rows_takes_strided_rows_and_gives_zeros_for_negative_ids(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, size: int
) -> None:
    x = torch.randn(10, size + 8, device=device).to(dtype)[:, :size]
    ids = torch.tensor([9, 0, -1, 4, 4], device=device)
    expected = x[ids.clamp(min=0)]
    expected[2] = 0

    assert torch.equal(elementwise.gather_rows(cuda_module, x, ids), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_dim", [64, 5])
def test_blocks_are_copied_in_all_caches_pair_after_pair(
    cuda_module: Any, device: torch.device, head_dim: int, dtype: torch.dtype
) -> None:
    caches = [torch.randn(6, 4, 2, head_dim, device=device).to(dtype) for _ in range(3)]
    expected = [cache.clone() for cache in caches]
    pairs = [(0, 1), (0, 2), (1, 3), (3, 3), (4, 0)]
    for cache in expected:
        for source, target in pairs:
            cache[target] = cache[source]

    elementwise.BlockCopier(cuda_module, caches).copy(pairs)

    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache, other)


def test_blocks_outside_the_cache_are_refused(cuda_module: Any, device: torch.device) -> None:
    copier = elementwise.BlockCopier(cuda_module, [torch.zeros(4, 2, device=device)])

    with pytest.raises(IndexError, match="block 4 does not exist; the cache has 4"):
        copier.copy([(0, 4)])


def test_tokens_of_the_last_step_become_inputs_of_the_next(
    cuda_module: Any, device: torch.device
) -> None:
    input_ids = torch.tensor([10, 11, 12, 13], device=device)
    source_rows = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=device)
    last_tokens = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)

    elementwise.feed_tokens(cuda_module, input_ids, source_rows, last_tokens)

    assert input_ids.tolist() == [9, 11, 7, 13]


def test_wrong_tensors_are_refused_before_the_kernel(
    cuda_module: Any, device: torch.device
) -> None:
    x = torch.zeros(2, 8, device=device)
    norm = make_norm(4, device)
    with pytest.raises(ValueError, match=r"norm\.weight must be contiguous"):
        elementwise.rms_norm(cuda_module, x, norm)
    with pytest.raises(ValueError, match="adjacent elements"):
        elementwise.rms_norm(cuda_module, x.t(), make_norm(2, device))
    with pytest.raises(ValueError, match="x must be torch"):
        elementwise.rms_norm(cuda_module, x.half(), make_norm(8, device), out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        elementwise.act_mul(cuda_module, x, "relu")
    with pytest.raises(ValueError, match="it must be above 0"):
        elementwise.softcap(cuda_module, x, 0.0)


def test_no_rows_are_no_work(cuda_module: Any, device: torch.device) -> None:
    nothing = torch.zeros(0, 16, device=device)
    norm = make_norm(16, device)

    assert elementwise.rms_norm(cuda_module, nothing, norm).shape == (0, 16)
    assert elementwise.act_mul(cuda_module, nothing, "silu").shape == (0, 8)
    elementwise.feed_tokens(
        cuda_module,
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
