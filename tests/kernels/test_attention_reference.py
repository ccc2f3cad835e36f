"""The readable versions in torch give what the compiled kernels give."""

from __future__ import annotations

import pytest
import torch

from llmserve import kernels
from llmserve.kernels import reference_attention as reference

pytestmark = pytest.mark.skipif(not kernels.HAS_EXT, reason="there is only the reference")


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize("logit_softcap", [None, 2.0])
def test_attention_over_what_either_has_written(
    sliding_window: int | None, logit_softcap: float | None
) -> None:
    torch.manual_seed(0)
    block_tables = torch.tensor([[3, 1, 5], [2, 3, -1]], dtype=torch.int32)
    slots = torch.tensor([*range(48, 64), *range(16, 32), 80, -1, *range(32, 48)])
    k, v = torch.randn(50, 2, 24) * 2, torch.randn(50, 2, 24)
    results = []
    for module in (kernels, reference):
        cache = torch.full((2, 6, 16, 2, 24), float("nan"), dtype=torch.float16)
        module.write_kv(k, v, cache[0], cache[1], slots)
        module.copy_blocks(cache[0], [(2, 4), (4, 2)])
        results.append(
            module.paged_attention(
                torch.randn(7, 4, 24, generator=torch.Generator().manual_seed(1)),
                cache[0],
                cache[1],
                block_tables,
                torch.tensor([33, 30], dtype=torch.int32),
                torch.tensor([0, 2, 7], dtype=torch.int32),
                scale=0.3,
                sliding_window=sliding_window,
                logit_softcap=logit_softcap,
            )
        )

    torch.testing.assert_close(results[0], results[1], rtol=0, atol=3e-6)


def test_norms() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    for module in (kernels, reference):
        result = module.rms_norm(x, weight, 1e-6, weight_offset=1.0)
        torch.testing.assert_close(result, kernels.rms_norm(x, weight + 1.0, 1e-6))
    sums = [residual.clone(), residual.clone()]
    results = [
        module.add_rms_norm(x, total, weight, 1e-6)
        for module, total in zip((kernels, reference), sums, strict=True)
    ]

    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(sums[0], sums[1])


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotary(is_interleaved: bool) -> None:
    torch.manual_seed(0)
    angles = torch.rand(9, 5)
    q, k = torch.randn(3, 4, 12), torch.randn(3, 2, 12)
    others = q.clone(), k.clone()
    positions = torch.tensor([0, 8, 2])
    for module, (a, b) in ((kernels, (q, k)), (reference, others)):
        module.rotary(a, b, positions, angles.cos(), angles.sin(), is_interleaved=is_interleaved)

    torch.testing.assert_close((q, k), others)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activations(activation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40)

    torch.testing.assert_close(
        kernels.act_mul(x, activation), reference.act_mul(x, activation), rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(kernels.softcap(x.clone(), 0.7), reference.softcap(x.clone(), 0.7))
