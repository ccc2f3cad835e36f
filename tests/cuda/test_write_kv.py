"""Norm of heads, rotary embedding and the KV cache's writes against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from llmserve.kernels import NormParameters, RotaryParameters
from llmserve.kernels.cuda import write_kv

CACHE_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
ACT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 4, 5
MAX_POSITIONS = 40

# Half a unit in the last place, of the nearest larger power of two.
ROUNDING = {
    torch.float32: 2e-6,
    torch.float16: 2**-11 + 2e-6,
    torch.bfloat16: 2**-8 + 2e-6,
    torch.float8_e4m3fn: 2**-4 + 2e-6,
}
# Of float8 in subnormal steps of 2^-9.
ABSOLUTE = {torch.float8_e4m3fn: 2**-10}


class Step:
    """q, k and v inside a fused projection, slots in shuffled blocks, and empty caches."""

    def __init__(
        self,
        device: torch.device,
        head_dim: int,
        act: torch.dtype,
        cache: torch.dtype,
        num_tokens: int = 7,
    ) -> None:
        row = (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim
        self.fused = (torch.randn(num_tokens, row, device=device) * 2).to(act)
        sizes = (NUM_HEADS * head_dim, NUM_KV_HEADS * head_dim, NUM_KV_HEADS * head_dim)
        self.q, self.k, self.v = (
            part.view(num_tokens, -1, head_dim) for part in self.fused.split(sizes, 1)
        )
        self.positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), device=device)
        slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
        slots[num_tokens // 2] = -1
        self.slots = slots.to(device)
        shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
        self.caches = (
            torch.empty(shape, dtype=cache, device=device),
            torch.empty(shape, dtype=cache, device=device),
        )
        for tensor in self.caches:
            tensor.fill_(float("nan"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_rotary(
    half_dim: int, device: torch.device, *, is_interleaved: bool = False
) -> RotaryParameters:
    angles = torch.rand(MAX_POSITIONS, half_dim, device=device) * 7
    return RotaryParameters(angles.cos() * 1.1, angles.sin() * 1.1, is_interleaved)


def make_norm(head_dim: int, device: torch.device) -> NormParameters:
    return NormParameters(torch.randn(head_dim, device=device), 1e-6, 1.0)


def normalize(x: torch.Tensor, norm: NormParameters | None) -> torch.Tensor:
    x = x.double()
    if norm is None:
        return x
    return F.rms_norm(x, x.shape[-1:], norm.weight.double() + norm.weight_offset, norm.eps)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, rotary: RotaryParameters | None
) -> torch.Tensor:
    """x: float64 [num_tokens, num_heads, head_dim]."""
    if rotary is None:
        return x
    half_dim = rotary.cos.shape[1]
    cos, sin = rotary.cos[positions, None].double(), rotary.sin[positions, None].double()
    result = x.clone()
    head = x[..., : 2 * half_dim]
    if rotary.is_interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        result[..., 0 : 2 * half_dim : 2] = a * cos - b * sin
        result[..., 1 : 2 * half_dim : 2] = b * cos + a * sin
    else:
        a, b = head.split(half_dim, dim=-1)
        result[..., :half_dim] = a * cos - b * sin
        result[..., half_dim : 2 * half_dim] = b * cos + a * sin
    return result


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    dtype = actual.dtype
    torch.testing.assert_close(
        actual.float().double(),
        expected,
        rtol=ROUNDING[dtype],
        atol=ABSOLUTE.get(dtype, 4e-6),
    )


def assert_stored(cache: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """values: float64 [num_tokens, num_kv_heads, head_dim]. Other slots are still NaN."""
    rows = cache.float().view(-1, *cache.shape[2:])
    is_stored = slots >= 0
    assert_close(cache.view(-1, *cache.shape[2:])[slots[is_stored]], values[is_stored])
    others = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    others[slots[is_stored]] = False
    assert rows[others].isnan().all()


@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("act", ACT_DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normalised_rotated_and_stored(
    cuda_module: Any, device: torch.device, has_norm: bool, act: torch.dtype, cache: torch.dtype
) -> None:
    step = Step(device, 64, act, cache)
    rotary = make_rotary(32, device)
    q_norm, k_norm = (make_norm(64, device) if has_norm else None for _ in range(2))
    q = rotate(normalize(step.q, q_norm), step.positions, rotary)
    k = rotate(normalize(step.k, k_norm), step.positions, rotary)
    v, kv_before = step.v.double(), step.fused[:, NUM_HEADS * 64 :].clone()

    write_kv.rotate_and_write_kv(
        cuda_module,
        step.q,
        step.k,
        step.v,
        rotary=rotary,
        positions=step.positions,
        q_norm=q_norm,
        k_norm=k_norm,
        caches=step.caches,
        slot_mapping=step.slots,
    )

    assert_close(step.q, q)
    assert_stored(step.caches[0], k, step.slots)
    assert_stored(step.caches[1], v, step.slots)
    assert torch.equal(step.fused[:, NUM_HEADS * 64 :], kv_before)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "half_dim"),
    [
        (64, 8),
        (64, 6),
        (80, 16),
        (80, 40),
        (96, 48),
        (128, 64),
        (256, 128),
        (20, 5),
        (248, 124),
        (13, 3),
    ],
)
def test_any_head_and_any_part_of_it_is_rotated(
    cuda_module: Any, device: torch.device, head_dim: int, half_dim: int, is_interleaved: bool
) -> None:
    step = Step(device, head_dim, torch.bfloat16, torch.bfloat16, num_tokens=3)
    rotary = make_rotary(half_dim, device, is_interleaved=is_interleaved)
    q_norm, k_norm = make_norm(head_dim, device), make_norm(head_dim, device)
    q = rotate(normalize(step.q, q_norm), step.positions, rotary)
    k = rotate(normalize(step.k, k_norm), step.positions, rotary)
    v = step.v.double()

    write_kv.rotate_and_write_kv(
        cuda_module,
        step.q,
        step.k,
        step.v,
        rotary=rotary,
        positions=step.positions,
        q_norm=q_norm,
        k_norm=k_norm,
        caches=step.caches,
        slot_mapping=step.slots,
    )

    assert_close(step.q, q)
    assert_stored(step.caches[0], k, step.slots)
    assert_stored(step.caches[1], v, step.slots)


def test_without_rotary_the_heads_are_stored_as_they_are(
    cuda_module: Any, device: torch.device
) -> None:
    step = Step(device, 64, torch.bfloat16, torch.bfloat16)
    before = step.fused.clone()

    write_kv.rotate_and_write_kv(
        cuda_module, step.q, step.k, step.v, caches=step.caches, slot_mapping=step.slots
    )

    assert torch.equal(step.fused, before)
    assert_stored(step.caches[0], step.k.double(), step.slots)
    assert_stored(step.caches[1], step.v.double(), step.slots)


@pytest.mark.parametrize("head_dim", [20, 64])
def test_without_caches_q_and_k_are_rotated_in_place(
    cuda_module: Any, device: torch.device, head_dim: int
) -> None:
    step = Step(device, head_dim, torch.float32, torch.float32)
    rotary = make_rotary(10, device)
    q = rotate(step.q.double(), step.positions, rotary)
    k = rotate(step.k.double(), step.positions, rotary)
    v = step.v.clone()

    write_kv.rotate_and_write_kv(
        cuda_module,
        step.q,
        step.k,
        None,
        rotary=rotary,
        positions=step.positions,
        is_k_kept=True,
    )

    assert_close(step.q, q)
    assert_close(step.k, k)
    assert torch.equal(step.v, v)


@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
def test_values_are_divided_by_the_scale_of_their_head(
    cuda_module: Any, device: torch.device, cache: torch.dtype
) -> None:
    step = Step(device, 64, torch.bfloat16, cache)
    scales = (torch.tensor([0.25, 3.0], device=device), torch.tensor([1.5, 0.01], device=device))

    write_kv.rotate_and_write_kv(
        cuda_module,
        step.q,
        step.k,
        step.v,
        caches=step.caches,
        slot_mapping=step.slots,
        scales=scales,
    )

    limit = 448.0 if cache == torch.float8_e4m3fn else float("inf")
    for stored, values, scale in zip(step.caches, (step.k, step.v), scales, strict=True):
        expected = (values.double() / scale.double()[:, None]).clamp(-limit, limit)
        assert_stored(stored, expected, step.slots)


@pytest.mark.parametrize(
    ("cache", "largest"), [(torch.float16, 65504.0), (torch.float8_e4m3fn, 448.0)]
)
def test_values_beyond_the_range_become_the_largest(
    cuda_module: Any, device: torch.device, cache: torch.dtype, largest: float
) -> None:
    step = Step(device, 64, torch.float32, cache)
    step.k[:, :, ::2], step.k[:, :, 1::2] = 1e6, -1e6

    write_kv.rotate_and_write_kv(
        cuda_module, step.q, step.k, step.v, caches=step.caches, slot_mapping=step.slots
    )

    stored = step.caches[0].float().view(-1, NUM_KV_HEADS, 64)[step.slots[step.slots >= 0]]
    assert (stored[..., ::2] == largest).all()
    assert (stored[..., 1::2] == -largest).all()


def test_slots_and_positions_outside_touch_nothing_else(
    cuda_module: Any, device: torch.device
) -> None:
    step = Step(device, 64, torch.bfloat16, torch.bfloat16)
    step.slots[0], step.slots[1] = NUM_BLOCKS * BLOCK_SIZE, -7
    step.positions[2], step.positions[3] = -1, MAX_POSITIONS
    nearest = step.positions.clamp(0, MAX_POSITIONS - 1)
    rotary = make_rotary(32, device)
    k = rotate(step.k.double(), nearest, rotary)
    is_outside = step.slots >= NUM_BLOCKS * BLOCK_SIZE

    write_kv.rotate_and_write_kv(
        cuda_module,
        step.q,
        step.k,
        step.v,
        rotary=rotary,
        positions=step.positions,
        caches=step.caches,
        slot_mapping=step.slots,
    )

    assert_stored(step.caches[0], k, step.slots.masked_fill(is_outside, -1))


def test_wrong_tensors_are_refused_before_the_kernel(
    cuda_module: Any, device: torch.device
) -> None:
    step = Step(device, 64, torch.bfloat16, torch.bfloat16)

    def write(**changes: Any) -> None:
        arguments = {
            "q": step.q,
            "k": step.k,
            "v": step.v,
            "caches": step.caches,
            "slot_mapping": step.slots,
        }
        write_kv.rotate_and_write_kv(cuda_module, **arguments | changes)

    with pytest.raises(ValueError, match="slot_mapping must be contiguous"):
        write(slot_mapping=step.slots.int())
    with pytest.raises(ValueError, match="come together or not at all"):
        write(v=None)
    with pytest.raises(ValueError, match=r"v must be torch\.bfloat16"):
        write(v=step.v.float())
    with pytest.raises(ValueError, match="k_cache must be"):
        write(caches=(step.caches[0][..., :32], step.caches[1]))
    with pytest.raises(ValueError, match="does not fit heads of 64 values"):
        write(rotary=make_rotary(33, device), positions=step.positions)
