"""Grammar masks, computed in a thread of their own while the forward pass runs.

After each token, what may come next is computed ahead: the token is accepted and the next mask
made while the step ends, the next one is scheduled and the model runs. A grammar computes without
the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from llmserve.core.grammar import Grammar, GrammarState

# Up to this share of allowed tokens, their logits are picked out; above it, all are compared.
_FEW = 1 / 32
# By the byte of a mask: the highest value of the logits of its 8 tokens. Reading them here is ten
# times as fast as branching on each bit, which no processor can predict.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)

# A slow mask holds up the whole batch. One may be slow because it prepares those that follow.
_MAX_MASK_S = 0.1
_MAX_SLOW_MASKS = 1


class GrammarFailedError(Exception):
    """The grammar cannot tell what comes next. The cause is what it raised."""


class Mask:
    """Which tokens may come next, ready to be applied to a row of logits."""

    def __init__(self, raw: bytes, end_ids: npt.NDArray[np.int64], *, ends_late: bool) -> None:
        """raw: as GrammarState.mask gives it. ends_late: ids of `end_ids` are allowed only where
        nothing else is."""
        packed = np.frombuffer(raw, np.uint8)
        allowed = np.unpackbits(packed, bitorder="little").view(np.bool_)
        ends = end_ids[end_ids < len(allowed)]
        num_allowed = int(np.count_nonzero(allowed))
        self.is_at_end = num_allowed <= int(np.count_nonzero(allowed[ends]))
        without = ends if ends_late and not self.is_at_end else ends[:0]
        self._allowed_ids: npt.NDArray[np.intp] | None = None
        self._limits: npt.NDArray[np.float32] | None = None
        if num_allowed < len(allowed) * _FEW:
            allowed[without] = False
            self._allowed_ids = np.flatnonzero(allowed)
        else:
            self._limits = np.take(_LIMITS, packed, axis=0).reshape(-1)
            self._limits[without] = -np.inf

    def apply(self, row: npt.NDArray[np.float32]) -> None:
        """Sets the logits [vocab_size] of tokens that may not come next to -inf."""
        if self._allowed_ids is not None:
            ids = self._allowed_ids[self._allowed_ids < len(row)]
            logits = row[ids]
            row.fill(-np.inf)
            row[ids] = logits
        if self._limits is not None:
            size = min(len(row), len(self._limits))
            row[size:] = -np.inf
            np.minimum(row[:size], self._limits[:size], out=row[:size])


class MaskThread:
    """Runs the grammars of all sequences. The thread starts with the first one."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, follower: GrammarFollower, token_ids: Sequence[int]) -> Future[Mask]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmserve-masks")
        return self._pool.submit(follower.advance, token_ids)


class GrammarFollower:
    """One sequence's way through its grammar."""

    def __init__(
        self,
        grammar: Grammar,
        thread: MaskThread,
        output_token_ids: Sequence[int],
        end_ids: npt.NDArray[np.int64],
        *,
        ends_late: bool,
    ) -> None:
        """A resumed sequence brings its output."""
        self._grammar = grammar
        self._thread = thread
        self._end_ids = end_ids
        self._ends_late = ends_late
        self._state: GrammarState | None = None
        self._num_slow = 0
        self._next = thread.submit(self, tuple(output_token_ids))

    def mask(self) -> Mask:
        """What may come next. Waits for it. Raises GrammarFailedError."""
        try:
            return self._next.result()
        except Exception as error:
            raise GrammarFailedError(str(error)) from error

    def append(self, token_id: int) -> None:
        """The sequence goes on; the next mask is begun."""
        self._next = self._thread.submit(self, (token_id,))

    def close(self) -> None:
        """The sequence is gone: a mask that is not begun is not needed."""
        self._next.cancel()

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
