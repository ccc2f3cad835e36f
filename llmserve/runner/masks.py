"""Grammar masks, computed in a thread of their own while the forward pass runs.

After each step, what may come next is computed ahead: the step's tokens are accepted and the next
masks made while the step ends, the next one is scheduled and the model runs. A grammar computes
without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from llmserve.core.grammar import Grammar, GrammarState

# A slow mask holds up the whole batch. One may be slow because it prepares those that follow.
_MAX_MASK_S = 0.1
_MAX_SLOW_MASKS = 1


class GrammarFailedError(Exception):
    """The grammar cannot tell what comes next. The cause is what it raised."""


class Mask:
    """Which tokens may come next, a bit each: `bits` are those of sample_rows."""

    def __init__(self, raw: bytes, end_ids: npt.NDArray[np.int64], *, ends_late: bool) -> None:
        """raw: as GrammarState.mask gives it. ends_late: ids of `end_ids` are allowed only where
        nothing else is."""
        self.bits = np.frombuffer(raw, np.uint8)
        self._end_ids = end_ids
        if ends_late and not self.is_at_end:
            self.bits = self._bits_without_ends()

    @property
    def is_at_end(self) -> bool:
        """Whether only ids of `end_ids` may come next, or nothing. Costs microseconds."""
        return not self._bits_without_ends().any()

    def _bits_without_ends(self) -> npt.NDArray[np.uint8]:
        bits = self.bits.copy()
        for token_id in self._end_ids.tolist():
            if token_id < 8 * len(bits):
                bits[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
        return bits


class MaskThread:
    """Runs the grammars of all sequences. The thread starts with the first one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmserve-masks")

    def begin(self, followers: Iterable[GrammarFollower]) -> None:
        """Begins the next masks of those that have gone on.

        They are one job: handing one over takes as long as finding a mask.
        """
        work = []
        for follower in followers:
            token_ids = follower.take_token_ids()
            if token_ids is not None:
                work.append((follower, token_ids))
        if not work:
            return
        job = self._pool.submit(_advance, work)
        for place, (follower, _) in enumerate(work):
            follower.expect(job, place)


class GrammarFollower:
    """One sequence's way through its grammar."""

    def __init__(
        self,
        grammar: Grammar,
        output_token_ids: Sequence[int],
        end_ids: npt.NDArray[np.int64],
        *,
        ends_late: bool,
    ) -> None:
        """A resumed sequence brings its output. Has no mask until MaskThread.begin."""
        self.is_closed = False
        self._grammar = grammar
        self._end_ids = end_ids
        self._ends_late = ends_late
        self._state: GrammarState | None = None
        self._num_slow = 0
        self._token_ids: list[int] | None = list(output_token_ids)
        self._next: tuple[Future[list[Mask | Exception]], int] | None = None

    def mask(self) -> Mask:
        """What may come next. Waits for it. Raises GrammarFailedError."""
        assert self._next is not None
        job, place = self._next
        result = job.result()[place]
        if isinstance(result, Exception):
            raise GrammarFailedError(str(result)) from result
        return result

    def append(self, token_id: int) -> None:
        """The sequence goes on; MaskThread.begin is due."""
        self._token_ids = [*(self._token_ids or ()), token_id]

    def close(self) -> None:
        """The sequence is gone: a mask that is not begun is not needed."""
        self.is_closed = True

    def take_token_ids(self) -> list[int] | None:
        """Tokens that the next mask is behind; None if it is begun."""
        token_ids, self._token_ids = self._token_ids, None
        return token_ids

    def expect(self, job: Future[list[Mask | Exception]], place: int) -> None:
        """The next mask will be at `place` in the results of `job`."""
        self._next = (job, place)

    def advance(self, token_ids: Sequence[int]) -> Mask:
        """In the thread: the mask behind `token_ids`."""
        if self._state is None:
            self._state = self._grammar.start()
        for token_id in token_ids:
            self._state.accept(token_id)
        begin = time.thread_time()
        raw = self._state.mask()
        self._num_slow += time.thread_time() - begin > _MAX_MASK_S
        if self._num_slow > _MAX_SLOW_MASKS:
            raise GrammarFailedError("finding what may come next takes too long")
        return Mask(raw, self._end_ids, ends_late=self._ends_late)


def _advance(work: list[tuple[GrammarFollower, list[int]]]) -> list[Mask | Exception]:
    """In the thread: a mask, or why there is none, for each; one's error is not another's."""
    results: list[Mask | Exception] = []
    for follower, token_ids in work:
        try:
            if follower.is_closed:
                raise GrammarFailedError("the sequence is gone")
            results.append(follower.advance(token_ids))
        except Exception as error:
            results.append(error)
    return results
