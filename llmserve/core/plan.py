"""What one step shall do: scheduler -> executor.

A plan holds changes, not state: the runner keeps a row for every sequence that it knows (tokens,
block tables, sampling state) and the plan says what is new, what grows and what is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the runner does not hold: first scheduled, or resumed after preemption."""

    request_id: str
    token_ids: list[int]  # all tokens so far, prompt first; the runner copies them
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[list[int], ...]  # one block table per KV cache group, position-indexed


@dataclass(slots=True)
class StepPlan:
    """One step. The i-th entries of the parallel lists belong to one sequence.

    The runner applies in this order: `released_ids`, `new`, `new_block_ids`, `block_copies`, then
    the forward pass over `request_ids`. A sequence samples when its scheduled tokens reach its
    last token: `num_computed_tokens + num_scheduled_tokens == num_tokens`, where `num_tokens`
    counts the token that the step before samples, which the runner alone may know yet.
    """

    request_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)  # before the step
    num_scheduled_tokens: list[int] = field(default_factory=list)
    is_sampling: list[bool] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    # Appended to the block tables of sequences the runner already holds: one list per group.
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target)
    released_ids: list[str] = field(default_factory=list)  # finished, aborted or preempted
    total_num_scheduled_tokens: int = 0
    # Some sequence is sampled by rules that look at its output (SamplingParams.depends_on_output),
    # and the last step may still run: its result must be known before this step samples.
    needs_last_result: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing to compute; the runner may still have rows to release."""
        return not self.request_ids
