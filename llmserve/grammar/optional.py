"""A grammar before which the model may think, or not: it decides by how the output begins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmserve.core.grammar import Grammar, GrammarState
from llmserve.grammar.spec import GrammarError
from llmserve.grammar.vocabulary import Vocabulary


class Opening:
    """The tokens that spell a marker at the start of an output, and nothing beyond it."""

    def __init__(self, text: str, vocabulary: Vocabulary, num_bytes: int) -> None:
        """Masks have `num_bytes`."""
        raw = text.encode()
        token_id = vocabulary.special_id(text)
        tokens = vocabulary.tokens
        if token_id is not None:
            pieces = [token_id]
        else:
            pieces = [i for i, token in enumerate(tokens) if token and token in raw]
        # By bytes done: token -> bytes done with it.
        self._ids = [
            {i: done + len(tokens[i]) for i in pieces if raw.startswith(tokens[i], done)}
            for done in range(len(raw))
        ]
        self._size = len(raw)
        self._num_bytes = num_bytes

    def mask(self, done: int) -> npt.NDArray[np.uint8]:
        """Which tokens go on with the marker, of which `done` bytes are there."""
        bits = np.zeros(self._num_bytes * 8, np.bool_)
        bits[list(self._ids[done])] = True
        return np.packbits(bits, bitorder="little")

    def append(self, done: int, token_id: int) -> int | None:
        """Bytes that are there with another token; None if it does not go on with the marker."""
        return self._ids[done].get(token_id)

    def is_complete(self, done: int) -> bool:
        return done == self._size


class OptionalGrammar:
    """`delayed` holds for output that begins with the opening, `body` for any other."""

    def __init__(self, opening: Opening, delayed: Grammar, body: Grammar) -> None:
        self._opening = opening
        self._delayed = delayed
        self._body = body

    def start(self) -> GrammarState:
        return _OptionalState(self._opening, self._delayed, self._body.start())


class _OptionalState:
    """Both ways are followed until one is left; a complete opening wins."""

    def __init__(self, opening: Opening, delayed: Grammar, body: GrammarState) -> None:
        self._opening = opening
        self._delayed = delayed
        self._done: int | None = 0  # None: the opening is no longer possible
        self._body: GrammarState | None = body

    def mask(self) -> bytes:
        if self._done is None:
            assert self._body is not None
            return self._body.mask()
        mask = self._opening.mask(self._done)
        if self._body is not None:
            mask |= np.frombuffer(self._body.mask(), np.uint8)
        return mask.tobytes()

    def accept(self, token_id: int) -> None:
        done = None if self._done is None else self._opening.append(self._done, token_id)
        if done is not None and self._opening.is_complete(done):
            self._done, self._body = None, self._delayed.start()
            return
        if done is not None and self._body is not None and not self._is_allowed(token_id):
            self._body = None
        self._done = done
        if self._body is not None:
            self._body.accept(token_id)
        elif done is None:
            raise GrammarError("the output neither thinks nor follows the grammar")

    def _is_allowed(self, token_id: int) -> bool:
        assert self._body is not None
        return bool(self._body.mask()[token_id // 8] >> token_id % 8 & 1)
