"""Writing K and V to the cache, and copying its blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from llmserve.kernels import HAS_EXT, copy_blocks, get_num_threads, set_num_threads, write_kv

if HAS_EXT:
    from llmserve import _cpu_kernels

    INSTRUCTION_SETS = [s for s in _cpu_kernels.available_instruction_sets() if "avx512" not in s]
else:
    INSTRUCTION_SETS = ["reference"]

SHAPE = (6, 8, 3, 20)  # num_blocks, block_size, num_kv_heads, head_dim
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(request.param)
    yield
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


def store(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round trip of float32 [n] through the cache."""
    cache = torch.zeros(1, 1, 1, len(values), dtype=dtype)
    write_kv(values.view(1, 1, -1), values.view(1, 1, -1), cache.clone(), cache, torch.tensor([0]))
    return cache.flatten()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_lands_in_its_slot_and_nowhere_else(
    dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    k, v = torch.randn(4, 3, 20), torch.randn(4, 3, 20)
    k_cache, v_cache = torch.full(SHAPE, 9.0, dtype=dtype), torch.full(SHAPE, 9.0, dtype=dtype)
    write_kv(k, v, k_cache, v_cache, torch.tensor([17, -1, 0, 47], dtype=slot_dtype))

    for x, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.full(SHAPE, 9.0, dtype=dtype).view(48, 3, 20)
        expected[[17, 0, 47]] = x[[0, 2, 3]].to(dtype)
        assert torch.equal(cache.view(48, 3, 20), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 16, (4096,), generator=generator)
    values = torch.randn(4096, generator=generator) * 2.0**exponents
    ties = torch.arange(-3000, 3000).float() * 2.0**-25
    values = torch.cat([values, ties, torch.tensor([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11])])

    values = values[values.abs() <= 65504]

    assert torch.equal(store(values, dtype), values.to(dtype))


def test_float16_saturates_and_keeps_nan() -> None:
    values = torch.tensor([65519.0, 65520.0, -1e30, float("inf"), -float("inf"), float("nan")])
    stored = store(values, torch.float16)

    assert stored[:5].tolist() == [65504.0, 65504.0, -65504.0, 65504.0, -65504.0]
    assert stored[5].isnan()


def test_bfloat16_keeps_infinity_and_nan() -> None:
    stored = store(torch.tensor([float("inf"), float("nan")]), torch.bfloat16)

    assert stored[0] == float("inf")
    assert stored[1].isnan()


def test_sources_and_cache_may_be_strided() -> None:
    fused = torch.randn(5, 10, 20)
    k, v = fused[:, 4:7], fused[:, 7:]
    both = torch.zeros(6, 2, 8, 3, 20, dtype=torch.float16)
    expected = torch.zeros(2, *SHAPE, dtype=torch.float16)
    slots = torch.tensor([3, 40, 8, 25, 1])
    write_kv(k, v, both[:, 0], both[:, 1], slots)
    write_kv(k.contiguous(), v.contiguous(), expected[0], expected[1], slots)

    assert torch.equal(both.transpose(0, 1), expected)


def test_many_tokens_are_stored_alike_on_any_number_of_threads() -> None:
    num_threads = get_num_threads()
    k, slots = torch.randn(3000, 2, 64), torch.randperm(3008)[:3000]
    caches = []
    for n in (1, 3):
        set_num_threads(n)
        cache = torch.zeros(188, 16, 2, 64, dtype=torch.float16)
        write_kv(k, k, cache, cache.clone(), slots)
        caches.append(cache)
    set_num_threads(num_threads)

    assert torch.equal(*caches)
    assert torch.equal(caches[0].view(3008, 2, 64)[slots], k.half())


def test_no_tokens_change_nothing() -> None:
    cache = torch.full(SHAPE, 9.0)
    write_kv(torch.empty(0, 3, 20), torch.empty(0, 3, 20), cache, cache, torch.empty(0).int())

    assert (cache == 9.0).all()


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
@pytest.mark.parametrize("slot", [48, -2])
def test_slot_outside_the_cache_is_refused_and_nothing_written(slot: int) -> None:
    cache = torch.full(SHAPE, 9.0)
    k = torch.zeros(2, 3, 20)

    with pytest.raises(IndexError, match=f"slot {slot} of token 1"):
        write_kv(k, k, cache, cache, torch.tensor([0, slot]))
    assert (cache == 9.0).all()


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
@pytest.mark.parametrize(
    ("k", "slots", "message"),
    [
        (torch.zeros(2, 3, 20).half(), torch.zeros(2).int(), "k must be float32"),
        (torch.zeros(2, 60), torch.zeros(2).int(), "k must be float32"),
        (torch.zeros(2, 2, 20), torch.zeros(2).int(), "k and v must have the shape"),
        (torch.zeros(2, 3, 20), torch.zeros(3).int(), "slot_mapping must be"),
        (torch.zeros(2, 3, 20), torch.zeros(2), "slot_mapping must be"),
        (torch.zeros(2, 3, 20), torch.zeros(4).int()[::2], "slot_mapping must be"),
    ],
)
def test_unfit_tensors_are_refused(k: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    cache = torch.zeros(SHAPE)

    with pytest.raises(ValueError, match=message):
        write_kv(k, torch.zeros(2, 3, 20), cache, cache, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_copied_in_the_order_of_the_list(dtype: torch.dtype) -> None:
    cache = torch.randn(SHAPE).to(dtype)
    before = cache.clone()
    copy_blocks(cache, [(1, 4), (4, 0), (2, 2)])

    assert torch.equal(cache[[0, 4]], before[[1, 1]])
    assert torch.equal(cache[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


def test_blocks_of_a_part_are_copied_alone() -> None:
    both = torch.randn(4, 2, 8, 3, 20)
    before = both.clone()
    copy_blocks(both[:, 1], [(3, 0)])

    assert torch.equal(both[0, 1], before[3, 1])
    assert torch.equal(both[:, 0], before[:, 0])


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
@pytest.mark.parametrize("pair", [(0, 6), (-1, 0)], ids=str)
def test_copy_of_a_block_outside_the_cache_is_refused(pair: tuple[int, int]) -> None:
    cache = torch.randn(SHAPE)
    before = cache.clone()

    with pytest.raises(IndexError, match="does not exist"):
        copy_blocks(cache, [(1, 2), pair])
    assert torch.equal(cache, before)


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
def test_blocks_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        copy_blocks(torch.zeros(SHAPE).transpose(1, 2), [(0, 1)])
