"""A step's input in the device's memory: the CPU's stands in for it."""

from __future__ import annotations

import numpy as np
import torch

from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.runner.batch import SequenceRows, StepArrays
from llmserve.runner.device_inputs import DeviceInputs, Feeds

BLOCK_SIZE = 4
NUM_GROUPS = 2


def make_inputs() -> DeviceInputs:
    return DeviceInputs(
        torch.device("cpu"),
        max_num_tokens=16,
        max_num_seqs=5,
        num_groups=NUM_GROUPS,
        max_blocks=8,
    )


def make_rows() -> SequenceRows:
    """Sequences a of 6 tokens and b of 3."""
    rows = SequenceRows(5, 32, BLOCK_SIZE, NUM_GROUPS)
    rows.add(NewSequence("a", [10, 11, 12, 13, 14, 15], 6, SamplingParams(), ([1, 2], [3, 4])))
    rows.add(NewSequence("b", [20, 21, 22], 3, SamplingParams(), ([5], [6])))
    return rows


def make_feeds(rows: SequenceRows, arrays: StepArrays) -> Feeds:
    return Feeds(
        rows.unknown_tokens(arrays),
        arrays.cu_seqlens[1:] - 1,
        arrays.rows.astype(np.int32),
    )


def test_step_lies_in_the_device_as_the_cpu_would_get_it() -> None:
    rows, inputs = make_rows(), make_inputs()
    plan = StepPlan(["a", "b"], [4, 0], [2, 3], [True, True])
    arrays = rows.arrange(plan)

    inputs.fill(arrays, make_feeds(rows, arrays))
    batch = inputs.batch(5, 2, arrays.max_query_len, arrays.max_seq_len)

    expected = rows.build(plan).forward
    assert torch.equal(batch.token_ids, expected.token_ids)
    for group, wanted in zip(batch.groups, expected.groups, strict=True):
        for name in ("positions", "slot_mapping", "seq_lens", "cu_seqlens_q"):
            assert torch.equal(getattr(group, name), getattr(wanted, name)), name
        width = wanted.block_tables.shape[1]
        assert torch.equal(group.block_tables[:, :width], wanted.block_tables)
        assert (group.max_query_len, group.max_seq_len) == (3, 6)
    assert inputs.sampled_idx(2).tolist() == [1, 4]
    assert inputs.target_rows(2).tolist() == [rows.row("a"), rows.row("b")]


def test_padding_writes_nowhere_and_sees_nothing() -> None:
    rows, inputs = make_rows(), make_inputs()
    arrays = rows.arrange(StepPlan(["a", "b"], [5, 2], [1, 1], [True, True]))

    inputs.fill(arrays, make_feeds(rows, arrays), num_seqs=4)
    batch = inputs.batch(4, 4, 1, 32)

    assert batch.token_ids.tolist() == [15, 22, 0, 0]
    assert inputs.source_rows(4).tolist() == [-1] * 4
    for group, slots in zip(batch.groups, ([9, 22, -1, -1], [17, 26, -1, -1]), strict=True):
        assert group.slot_mapping.tolist() == slots
        assert group.seq_lens.tolist() == [6, 3, 0, 0]
        assert group.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]


def test_tokens_of_no_sequence_are_padding_too() -> None:
    rows, inputs = make_rows(), make_inputs()
    arrays = rows.arrange(StepPlan(["a", "b"], [4, 2], [2, 1], [True, True]))

    inputs.fill(arrays, make_feeds(rows, arrays), num_tokens=6)
    batch = inputs.batch(6, 2, 2, 6)

    assert batch.token_ids.tolist() == [14, 15, 22, 0, 0, 0]
    assert inputs.source_rows(6).tolist() == [-1] * 6
    for group, slots in zip(batch.groups, ([8, 9, 22], [16, 17, 26]), strict=True):
        assert group.slot_mapping.tolist() == [*slots, -1, -1, -1]
        assert group.positions.tolist() == [4, 5, 2, 0, 0, 0]
        assert group.seq_lens.tolist() == [6, 3]
        assert group.cu_seqlens_q.tolist() == [0, 2, 3]


def test_inputs_keep_their_addresses_from_step_to_step() -> None:
    rows, inputs = make_rows(), make_inputs()
    kept = inputs.batch(1, 1, 1, 32)

    for name, num_computed, token_id in (("a", 5, 15), ("b", 2, 22), ("b", 0, 20)):
        arrays = rows.arrange(StepPlan([name], [num_computed], [1], [True]))
        inputs.fill(arrays, make_feeds(rows, arrays))

        assert kept.token_ids.tolist() == [token_id]
        assert kept.groups[1].seq_lens.tolist() == [num_computed + 1]


def test_token_that_the_device_alone_knows_is_fed_from_its_row() -> None:
    rows, inputs = make_rows(), make_inputs()
    b = rows.row("b")
    rows.append_unknown_tokens(np.array([b]))
    arrays = rows.arrange(StepPlan(["a", "b"], [0, 3], [2, 1], [False, True]))

    inputs.fill(arrays, make_feeds(rows, arrays))

    assert inputs.source_rows(3).tolist() == [-1, -1, b]


def test_row_of_a_sequence_that_comes_anew_has_known_tokens() -> None:
    rows = make_rows()
    rows.append_unknown_tokens(np.array([rows.row("b")]))
    rows.add(NewSequence("b", [20, 21, 22, 23], 3, SamplingParams(), ([5], [6])))

    arrays = rows.arrange(StepPlan(["b"], [3], [1], [True]))

    assert arrays.token_ids.tolist() == [23]
    assert rows.unknown_tokens(arrays).tolist() == [-1]


def test_step_of_nothing_but_padding_has_the_tokens_that_are_asked_for() -> None:
    inputs = make_inputs()

    inputs.fill_padding(3, 10)
    batch = inputs.batch(10, 3, 4, 32)

    for group in batch.groups:
        assert group.slot_mapping.tolist() == [-1] * 10
        assert group.seq_lens.tolist() == [0, 0, 0]
        assert group.cu_seqlens_q.tolist() == [0, 3, 6, 10]
