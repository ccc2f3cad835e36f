"""Beam search above single steps: which continuations of a prompt to keep, and which are done.

Pure bookkeeping, no asyncio. The rules are those of transformers' `generate(num_beams=...)` with
its defaults: candidates are ranked by the sum of their tokens' log-probabilities, finished ones
by that sum divided by `length ** length_penalty`, and the search ends when no running beam can
overtake the worst of a full set of finished ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmserve.core import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation: its tokens, what each was worth, and the sum of that."""

    token_ids: tuple[int, ...] = ()
    rows: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0  # running: sum of log-probabilities
    score: float = 0.0  # finished: the sum, divided by the length's penalty


class BeamSearch:
    """Grows beams token by token: read `running`, call `advance`, until `is_over`.

    Invariants: at most `width` beams run and at most `width` are finished; all running ones have
    the same length; `finished` is sorted, best first.
    """

    def __init__(
        self,
        width: int,
        length_penalty: float,
        sampling: SamplingParams,
        hits_stop_string: Callable[[tuple[int, ...]], bool],
    ) -> None:
        """Of `sampling` only the limits and the ending tokens count."""
        self.running = [Beam()]
        self.finished: list[Beam] = []
        self.is_over = False
        self._width = width
        self._length_penalty = length_penalty
        self._min_tokens = sampling.min_tokens
        self._max_tokens = sampling.max_tokens
        self._end_ids = frozenset((*sampling.eos_token_ids, *sampling.stop_token_ids))
        self._hits_stop_string = hits_stop_string
        # So many that `width` of them go on even if every beam meets every ending token.
        self._num_candidates = width * max(2, 1 + len(self._end_ids))

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens `advance` needs of each running beam."""
        return self._num_candidates + (len(self._end_ids) if self._min_tokens else 0)

    def advance(self, rows: Sequence[TokenLogprobs]) -> None:
        """Takes the likeliest next tokens of `running[i]` in `rows[i].top_ids`."""
        candidates = self._candidates(rows)
        self.running = []
        for position, beam in enumerate(candidates):
            if self._ends(beam):
                if position < self._width:
                    self._finish(beam)
            elif len(self.running) < self._width:
                self.running.append(beam)
        self.is_over = not self.running or not self._can_improve()

    def _candidates(self, rows: Sequence[TokenLogprobs]) -> list[Beam]:
        """The best continuations of all beams; ties go to the earlier beam, the likelier token."""
        found = []
        for beam, row in zip(self.running, rows, strict=True):
            is_too_short = len(beam.token_ids) < self._min_tokens
            for place, (token_id, logprob) in enumerate(
                zip(row.top_ids, row.top_logprobs, strict=True)
            ):
                if is_too_short and token_id in self._end_ids:
                    continue
                found.append((beam.total + logprob, beam, row, place))
        found.sort(key=lambda candidate: -candidate[0])
        return [
            _extend(beam, row, place, total)
            for total, beam, row, place in found[: self._num_candidates]
        ]

    def _ends(self, beam: Beam) -> bool:
        length = len(beam.token_ids)
        if length >= self._max_tokens or beam.token_ids[-1] in self._end_ids:
            return True
        return length > self._min_tokens and self._hits_stop_string(beam.token_ids)

    def _finish(self, beam: Beam) -> None:
        score = self._penalized(beam)
        self.finished.append(Beam(beam.token_ids, beam.rows, beam.total, score))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self._width :]

    def _penalized(self, beam: Beam) -> float:
        return float(beam.total / len(beam.token_ids) ** self._length_penalty)

    def _can_improve(self) -> bool:
        if len(self.finished) < self._width:
            return True
        return self._penalized(self.running[0]) > self.finished[-1].score


def _extend(beam: Beam, row: TokenLogprobs, place: int, total: float) -> Beam:
    """The beam and the token at `place` of its list of the likeliest."""
    token = TokenLogprobs(
        row.top_ids[place], row.top_logprobs[place], place + 1, row.top_ids, row.top_logprobs
    )
    return Beam((*beam.token_ids, token.token_id), (*beam.rows, token), total)
