"""The emulator itself: kernels that are wrong in one way each are found, their right twins pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cuda_emulator import build
from tests.cuda_emulator.device_memory import DeviceMemory, EmulatedModule

MUTANTS = build.EMULATOR / "mutants"
UNORDERED = "nothing orders the two"
UNWRITTEN = "nothing has written in this block"
UNFILLED = "has not filled yet: no copy_wait"

Result = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def mutants(device_memory: DeviceMemory) -> Any:
    sources = sorted([*MUTANTS.glob("*.cu"), *MUTANTS.glob("*.cpp")])
    library = build.build("_mutants", sources)
    return EmulatedModule(build.load("_mutants", library), device_memory)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def next_sums(x: torch.Tensor) -> torch.Tensor:
    return x + torch.cat([x[1:], x.new_zeros(1)])


def swapped_pairs(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 2).flip(1).flatten()


def swapped_fours(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 2, 4).flip(1).flatten()


def warp_sums(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.sum().repeat(len(part)) for part in x.split(32)])


# name, number of elements, what the right twin computes, what the emulator says of the wrong one
FLOATS: list[tuple[str, int, Result, str]] = [
    (
        "read_past_end",
        100,
        next_sums,
        r"^read_past_end_kernel<true>, block \(1, 0, 0\), thread \(35, 0, 0\), bounds.cu:\d+: "
        r"out of bounds: reads 4 bytes right after the end of the float32 tensor \[100\]$",
    ),
    ("write_past_end", 63, same, "writes 4 bytes right after the end"),
    ("write_before_start", 63, same, "writes 4 bytes 4 bytes before the float32 tensor"),
    ("misaligned_element", 63, same, "misaligned: reads 4 bytes .* no multiple of 4"),
    ("shared_index", 64, lambda x: x.roll(-1), "element 64 of an array of 64 in shared memory"),
    ("too_much_dynamic_shared", 64, same, "takes 516 bytes .* launch gave 512"),
    ("host_access", 63, next_sums, "host code of a launcher touches 4 bytes"),
    ("other_thread_stack", 64, same, "out of bounds: reads 4 bytes"),
    ("missing_barrier", 64, lambda x: x.flip(0), UNWRITTEN),
    ("barrier_in_branch", 64, same, r"at block_sync.* waits .* \(40, 0, 0\) has ended"),
    ("exit_before_barrier", 50, same, "divergence at block_sync.* waits .* has ended"),
    ("two_barriers", 64, same, "divergence at block_sync.* waits at block_sync"),
    ("shuffle_in_branch", 64, swapped_pairs, "divergence at a shuffle.* has ended"),
    ("exit_before_shuffle", 50, warp_sums, "divergence at a shuffle.* has ended"),
    ("missing_lane", 40, swapped_fours, "a shuffle reads lane 8, which does not exist"),
    ("missing_warp_sync", 64, swapped_pairs, UNWRITTEN),
    ("unwritten_shared", 50, same, UNWRITTEN),
    ("one_barrier_per_round", 64, lambda x: 2 * x.flip(0) + 1, f"race: .*{UNORDERED}"),
]


@pytest.mark.parametrize(("name", "n", "expected", "finding"), FLOATS, ids=[m[0] for m in FLOATS])
def test_float_mutants(mutants: Any, name: str, n: int, expected: Result, finding: str) -> None:
    x = torch.arange(1, n + 1, dtype=torch.float32)
    out = torch.empty(n)
    run = getattr(mutants, name)
    run(False, out.data_ptr(), x.data_ptr(), n)
    torch.testing.assert_close(out, expected(x), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=finding):
        run(True, out.data_ptr(), x.data_ptr(), n)
    out = torch.empty(n)
    run(False, out.data_ptr(), x.data_ptr(), n)  # a finding leaves nothing behind
    torch.testing.assert_close(out, expected(x), rtol=0, atol=0)


def test_misaligned_wide_load(mutants: Any) -> None:
    x = torch.arange(64, dtype=torch.float32)
    out = torch.empty(64)
    mutants.misaligned_load(False, out.data_ptr(), x.data_ptr(), 64)
    torch.testing.assert_close(out[:60], x[:60], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"misaligned: reads 16 bytes .* no multiple of 16"):
        mutants.misaligned_load(True, out.data_ptr(), x.data_ptr(), 64)


def test_write_between_rows(mutants: Any) -> None:
    x = torch.arange(5, dtype=torch.float32)
    rows = torch.zeros(5, 4)
    out = rows[:, :3]
    mutants.write_between_rows(False, out.data_ptr(), x.data_ptr(), 5)
    torch.testing.assert_close(out, x[:, None].expand(5, 3))
    with pytest.raises(RuntimeError, match=r"writes 4 bytes between the elements of .*\[5, 3\]"):
        mutants.write_between_rows(True, out.data_ptr(), x.data_ptr(), 5)


def test_unwritten_output_is_poison(mutants: Any) -> None:
    x = torch.arange(100, dtype=torch.float32)
    for broken, num_written in ((False, 100), (True, 64)):
        out = torch.empty(100)
        mutants.unwritten_tail(broken, out.data_ptr(), x.data_ptr(), 100)
        assert int(out.isfinite().sum()) == num_written


# name, elements of the result, what the right twin leaves there, the finding
NUM_BLOCKS, NUM_THREADS = 3, 64
INTEGERS: list[tuple[str, int, Result, str]] = [
    ("plain_counter", 1, lambda x: x.new_tensor([3]), f"that another block writes .*{UNORDERED}"),
    (
        "plain_shared_counter",
        3,
        lambda x: x.new_full((3,), 64),
        r"race: .* shared memory that thread .* writes",
    ),
    ("same_element", 192, same, "race: writes 4 bytes .* that another block writes"),
    (
        "neighbour_in_place",
        192,
        lambda x: torch.cat([next_sums(part) for part in x.split(64)]) * 0,
        "race: writes 4 bytes .* that another block reads",
    ),
    (
        "last_block_sum",
        5,
        lambda x: torch.tensor([3, *(int(part.sum()) for part in x.split(64)), int(x.sum())]),
        "race: reads 4 bytes .* that another block writes",
    ),
    ("spin_for_block", 4, lambda x: torch.tensor([1, 2, 3, 0]), "the thread does not end"),
]


@pytest.mark.parametrize(
    ("name", "n", "expected", "finding"), INTEGERS, ids=[m[0] for m in INTEGERS]
)
def test_integer_mutants(mutants: Any, name: str, n: int, expected: Result, finding: str) -> None:
    x = torch.arange(1, NUM_BLOCKS * NUM_THREADS + 1, dtype=torch.int32)
    out = torch.zeros(n, dtype=torch.int32)
    run = getattr(mutants, name)
    run(False, out.data_ptr(), x.data_ptr(), len(x))
    assert out.tolist() == expected(x).tolist()
    with pytest.raises(RuntimeError, match=finding):
        run(True, out.zero_().data_ptr(), x.data_ptr(), len(x))


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("copy_without_wait", UNFILLED),
        ("copy_without_commit", UNFILLED),
        ("copy_wait_for_older", UNFILLED),
        ("copy_without_barrier", f"{UNFILLED}|{UNORDERED}|{UNWRITTEN}"),
        ("copy_over_readers", f"race: (reads|writes) 16 bytes of shared memory .*{UNORDERED}"),
        ("copy_misaligned", "misaligned: writes 16 bytes"),
    ],
)
def test_copy_mutants(mutants: Any, name: str, finding: str) -> None:
    x = torch.randn(1024).half()
    out = torch.empty(1024, dtype=torch.float16)
    getattr(mutants, name)(False, out.data_ptr(), x.data_ptr(), 1024)
    assert torch.equal(out, x)
    with pytest.raises(RuntimeError, match=finding):
        getattr(mutants, name)(True, out.data_ptr(), x.data_ptr(), 1024)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """A [16, 16] and B [16, 16] (its first 8 columns count) in one tensor, and A @ B[:, :8]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 16, generator=generator).half()
    return x, (x[0].double() @ x[1, :, :8].double()).float()


def test_matrix_without_sync(mutants: Any) -> None:
    x, expected = matrices()
    out = torch.empty(16, 8)
    mutants.matrix_without_sync(False, out.data_ptr(), x.data_ptr(), 0)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=f"{UNORDERED}|{UNWRITTEN}"):
        mutants.matrix_without_sync(True, out.data_ptr(), x.data_ptr(), 0)


def test_swapped_fragments(mutants: Any) -> None:
    x, expected = matrices()
    out = torch.empty(16, 8)
    mutants.swapped_fragments(True, out.data_ptr(), x.data_ptr(), 0)
    assert (out - expected).abs().max() > 0.1


def test_unknown_memory(mutants: Any) -> None:
    x, out = torch.zeros(64), torch.empty(64)
    with pytest.raises(RuntimeError, match="out of bounds: reads"):
        mutants.unwritten_tail(False, out.data_ptr(), int(x.numpy().ctypes.data), 64)
