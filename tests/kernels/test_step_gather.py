"""The arrays of a step, compiled and by numpy, against what a plan means token by token."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from llmserve.kernels import HAS_EXT, GatheredArrays, reference_step, step_gather

GATHERS = {"reference": reference_step.step_gather}
if HAS_EXT:
    GATHERS["compiled"] = step_gather

NUM_ROWS, MAX_TOKENS, NUM_GROUPS, MAX_BLOCKS, BLOCK_SIZE = 5, 41, 3, 10, 4
Ints = npt.NDArray[np.int32]


def make_rows() -> tuple[Ints, Ints]:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 2**31, (NUM_ROWS, MAX_TOKENS), np.int32)
    tables = rng.integers(0, 2**31, (NUM_GROUPS, NUM_ROWS, MAX_BLOCKS), np.int32)
    return tokens, tables


def make_arrays(num_tokens: int, num_seqs: int, width: int) -> GatheredArrays:
    return GatheredArrays(
        np.full(num_tokens, -1, np.int64),
        np.full(num_tokens, -1, np.int64),
        np.full((NUM_GROUPS, num_tokens), -1, np.int64),
        np.full((NUM_GROUPS, num_seqs, width), -1, np.int32),
        np.full(num_seqs, -1, np.int32),
        np.full(num_seqs + 1, 0, np.int32),
    )


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize(
    ("rows", "num_computed", "num_scheduled"),
    [
        ([2], [0], [1]),
        ([4, 0, 1], [12, 0, 39], [1, 7, 1]),
        ([3, 2], [5, 0], [11, 40]),
        ([1, 0], [0, 3], [0, 1]),
    ],
)
def test_every_token_is_where_its_sequence_has_it(
    name: str, rows: list[int], num_computed: list[int], num_scheduled: list[int]
) -> None:
    tokens, tables = make_rows()
    out = make_arrays(sum(num_scheduled), len(rows), MAX_BLOCKS)

    GATHERS[name](tokens, tables, BLOCK_SIZE, out)(rows, num_computed, num_scheduled)

    place = 0
    for i, (row, first, count) in enumerate(zip(rows, num_computed, num_scheduled, strict=True)):
        assert out.cu_seqlens[i] == place
        assert out.seq_lens[i] == first + count
        num_blocks = -(-(first + count) // BLOCK_SIZE)
        for group in range(NUM_GROUPS):
            expected = tables[group, row, :num_blocks].tolist()
            assert out.tables[group, i].tolist() == expected + [-1] * (MAX_BLOCKS - num_blocks)
        for position in range(first, first + count):
            assert out.token_ids[place] == tokens[row, position]
            assert out.positions[place] == position
            for group in range(NUM_GROUPS):
                block_id = int(tables[group, row, position // BLOCK_SIZE])
                assert out.slots[group, place] == block_id * BLOCK_SIZE + position % BLOCK_SIZE
            place += 1
    assert out.cu_seqlens[-1] == place


@pytest.mark.skipif(not HAS_EXT, reason="needs the compiled kernels")
@pytest.mark.parametrize(
    ("row", "first", "count", "max_tokens", "width"),
    [
        (-1, 0, 1, 41, 8),
        (NUM_ROWS, 0, 1, 41, 8),
        (0, -1, 2, 41, 8),
        (0, 0, -1, 41, 8),
        (0, 2**62, 2**62, 41, 8),
        (0, 32, 1, 41, 8),  # behind the step's tables
        (0, 40, 1, 41, 12),  # behind the rows' tables
        (0, 18, 2, 19, 12),  # behind the rows' tokens
    ],
)
def test_what_is_not_there_is_refused_and_nothing_written(
    row: int, first: int, count: int, max_tokens: int, width: int
) -> None:
    tokens, tables = make_rows()
    tokens = np.ascontiguousarray(tokens[:, :max_tokens])
    out = make_arrays(1 + count if 0 <= count < 9 else 1, 2, width)

    with pytest.raises(IndexError, match="are not there"):
        step_gather(tokens, tables, BLOCK_SIZE, out)([1, row], [0, first], [1, count])

    assert (out.token_ids == -1).all()
    assert (out.tables == -1).all()


@pytest.mark.skipif(not HAS_EXT, reason="needs the compiled kernels")
def test_another_shape_is_refused() -> None:
    tokens, tables = make_rows()
    gather = step_gather(tokens, tables, BLOCK_SIZE, make_arrays(2, 2, 8))

    with pytest.raises(IndexError, match="there are 3 tokens, not 2"):
        gather([0, 1], [0, 0], [1, 2])
    for lists in (([0], [0], [2]), ([0, 1], [0], [1, 1]), ([0, 1], [0, 0], [1, 1, 1])):
        with pytest.raises(ValueError, match="another number of sequences"):
            gather(*lists)
    arrays = make_arrays(2, 2, 8)
    wrong = dataclasses.replace(arrays, slots=arrays.slots[:2])
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        step_gather(tokens, tables, 0, arrays)
    with pytest.raises(ValueError, match="slots must be contiguous int64"):
        step_gather(tokens, tables, BLOCK_SIZE, wrong)
