"""Rows of sequences, and the tensors that a plan becomes."""

from __future__ import annotations

import pytest

from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.runner.batch import SequenceRows


def make_rows(*, num_groups: int = 2, max_num_seqs: int = 3) -> SequenceRows:
    return SequenceRows(max_num_seqs, 32, 4, num_groups)


def make_sequence(request_id: str, token_ids: list[int], *tables: list[int]) -> NewSequence:
    return NewSequence(request_id, token_ids, len(token_ids), SamplingParams(), tables)


def test_mixed_step_lays_tokens_positions_and_slots_out_flat() -> None:
    rows = make_rows()
    rows.add(make_sequence("chunk", [10, 11, 12, 13, 14, 15, 16], [5, 6], [7, 8]))
    rows.add(make_sequence("decode", [20, 21, 22], [3], [9]))

    step = rows.build(StepPlan(["decode", "chunk"], [2, 3], [1, 3], [True, False]))

    forward = step.forward
    assert forward.token_ids.tolist() == [22, 13, 14, 15]
    assert forward.max_seq_len >= 6
    assert step.last_token_idx.tolist() == [0, 3]
    first, second = forward.groups
    assert first.positions.tolist() == [2, 3, 4, 5]
    assert first.slot_mapping.tolist() == [3 * 4 + 2, 5 * 4 + 3, 6 * 4, 6 * 4 + 1]
    assert second.slot_mapping.tolist() == [9 * 4 + 2, 7 * 4 + 3, 8 * 4, 8 * 4 + 1]
    assert first.seq_lens.tolist() == [3, 6]
    assert first.cu_seqlens_q.tolist() == [0, 1, 4]
    assert first.block_tables[1, :2].tolist() == [5, 6]
    assert second.block_tables[0, 0] == 9


def test_tensors_of_a_step_are_contiguous_for_the_kernels() -> None:
    rows = make_rows(num_groups=3)
    rows.add(make_sequence("a", [1, 2, 3, 4, 5], [1, 2], [3, 4], [5, 6]))
    rows.add(make_sequence("b", [1, 2], [7], [8], [9]))

    step = rows.build(StepPlan(["a", "b"], [0, 0], [5, 2], [True, True]))

    for group in step.forward.groups:
        assert group.slot_mapping.is_contiguous()
        assert group.block_tables.is_contiguous()
        assert len(group.block_tables) == 2
        assert group.block_tables.shape[1] >= 2


def test_appended_blocks_and_tokens_continue_a_row() -> None:
    rows = make_rows()
    rows.add(make_sequence("a", [1, 2, 3, 4], [1], [2]))
    rows.append_token(rows.row("a"), 99)
    rows.append_blocks("a", ([3], [4]))

    step = rows.build(StepPlan(["a"], [4], [1], [True]))

    assert step.forward.token_ids.tolist() == [99]
    assert [group.slot_mapping.tolist() for group in step.forward.groups] == [[12], [16]]


def test_groups_may_grow_by_different_numbers_of_blocks() -> None:
    rows = make_rows()
    rows.add(make_sequence("a", [1] * 9, [1, 2, 3], [4]))
    rows.append_blocks("a", ([], [5, 6]))

    step = rows.build(StepPlan(["a"], [8], [1], [True]))

    assert [group.block_tables[:, :3].tolist() for group in step.forward.groups] == [
        [[1, 2, 3]],
        [[4, 5, 6]],
    ]


def test_steps_of_one_shape_share_their_tensors() -> None:
    rows = make_rows()
    rows.add(make_sequence("a", [1, 2, 3, 4, 5], [1, 2], [3, 4]))

    first = rows.build(StepPlan(["a"], [2], [1], [False])).forward
    assert first.token_ids.tolist() == [3]
    second = rows.build(StepPlan(["a"], [4], [1], [True])).forward

    assert second is first
    assert second.token_ids.tolist() == [5]
    assert [group.slot_mapping.tolist() for group in second.groups] == [[8], [16]]
    assert rows.build(StepPlan(["a"], [3], [2], [True])).forward is not first


def test_no_context_is_longer_than_the_longest_that_a_row_can_have() -> None:
    rows = make_rows()
    rows.add(make_sequence("a", [1] * 31, list(range(8)), list(range(8, 16))))

    forward = rows.build(StepPlan(["a"], [30], [1], [True])).forward

    assert forward.max_seq_len == 32


def test_sequence_named_new_again_starts_from_its_new_state() -> None:
    rows = make_rows()
    rows.add(make_sequence("a", [1, 2, 3, 4, 5], [1, 2], [3, 4]))
    rows.add(make_sequence("a", [6, 7], [8], [9]))

    step = rows.build(StepPlan(["a"], [0], [2], [True]))

    assert len(rows) == 1
    assert step.forward.token_ids.tolist() == [6, 7]
    assert step.forward.groups[0].slot_mapping.tolist() == [32, 33]


def test_released_row_is_free_for_another_sequence() -> None:
    rows = make_rows(max_num_seqs=1)
    rows.add(make_sequence("a", [1], [1], [2]))
    rows.release("a")
    rows.release("a")

    rows.add(make_sequence("b", [2], [3], [4]))

    assert "a" not in rows
    assert "b" in rows


def test_more_sequences_than_rows_are_refused_and_leave_the_others_intact() -> None:
    rows = make_rows(max_num_seqs=1)
    rows.add(make_sequence("a", [1], [1], [2]))

    with pytest.raises(RuntimeError, match="more than 1 sequences"):
        rows.add(make_sequence("b", [2], [3], [4]))

    assert "a" in rows
    assert "b" not in rows
