"""nvcc's report on the kernels: no spills, no stack frames, the occupancy of docs/cuda.md."""

from __future__ import annotations

import pytest

from tests.cuda import ptxas_report
from tests.cuda.ptxas_report import MULTIPROCESSORS, Kernel

# Few threads, no inner loop: their stack frames cost nothing.
MAY_HAVE_STACK: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    if ptxas_report.nvcc.find_nvcc() is None:
        pytest.skip("needs nvcc")
    found = ptxas_report.parse(ptxas_report.logs())
    assert found
    return found


@pytest.mark.timeout(900)
def test_no_kernel_spills_or_has_a_stack_frame(kernels: list[Kernel]) -> None:
    wasteful = [
        kernel
        for kernel in kernels
        if kernel.spilled_bytes or (kernel.stack_bytes and kernel.family not in MAY_HAVE_STACK)
    ]

    assert wasteful == []


def test_nvcc_warns_of_nothing(kernels: list[Kernel]) -> None:
    assert [line for line in ptxas_report.logs().splitlines() if "warning" in line.lower()] == []


def test_every_kernel_says_how_it_is_launched(kernels: list[Kernel]) -> None:
    families = {kernel.family for kernel in kernels}
    launches = set(ptxas_report.LAUNCHES)

    unlisted = families - {launch.partition("<")[0] for launch in launches}
    assert unlisted == set(), "LAUNCHES in tests/cuda/ptxas_report.py lacks these"
    assert launches <= families | {kernel.name for kernel in kernels}


def test_the_table_of_the_docs_is_true(kernels: list[Kernel]) -> None:
    documented = ptxas_report.document_table()
    assert documented
    if ptxas_report.version() not in documented:
        pytest.skip("the table is of another release of nvcc")

    assert documented == ptxas_report.table(kernels), "python -m tests.cuda.ptxas_report"


LOG = """\
ptxas info    : Compiling entry function '_ZN1a1fIfEEvPKT_i' for 'sm_90'
ptxas info    : Function properties for _ZN1a1fIfEEvPKT_i
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 380 bytes cmem[0]
"""


def test_a_report_is_read() -> None:
    assert ptxas_report.parse(LOG) == [
        Kernel("f<float>", "sm_90", 40, shared_bytes=2048, stack_bytes=8, spilled_bytes=16)
    ]


@pytest.mark.parametrize(
    ("registers", "threads", "dynamic_bytes", "blocks"),
    [
        (32, 256, 0, 8),  # warps are the limit
        (32, 32, 0, 32),  # blocks are
        (128, 256, 0, 2),  # registers
        (168, 128, 0, 3),  # a quarter's registers hold three warps
        (32, 256, 100 * 1024, 2),  # shared memory
        (32, 256, 114 * 1024, 1),  # of which each block takes 1 KB more than it asks for
    ],
)
def test_occupancy(registers: int, threads: int, dynamic_bytes: int, blocks: int) -> None:
    kernel = Kernel("f", "sm_90", registers, shared_bytes=0, stack_bytes=0, spilled_bytes=0)

    assert MULTIPROCESSORS["sm_90"].blocks(kernel, threads, dynamic_bytes) == blocks
