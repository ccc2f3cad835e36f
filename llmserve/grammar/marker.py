"""Free text up to a marker, behind which a grammar begins: what a reasoning model thinks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmserve.grammar.spec import GrammarError
from llmserve.grammar.vocabulary import Vocabulary


class Marker:
    """A marker that is one special token, or text with or without some. Immutable.

    Before it any token may come but an end of sequence, and but those whose text completes the
    marker and goes on: the grammar would have to hold from within them. The model then spells the
    marker with tokens that end where it ends.
    """

    def __init__(self, text: str, vocabulary: Vocabulary, num_bytes: int) -> None:
        """Masks have `num_bytes`."""
        self._text = text.encode()
        self._tokens = vocabulary.tokens
        self._token_id = vocabulary.special_id(text)
        self._special_ids = vocabulary.special_ids
        free = np.zeros(num_bytes * 8, np.bool_)
        free[: len(self._tokens)] = True
        free[list(vocabulary.eos_token_ids)] = False
        overruns = [] if self._token_id is not None else self._overruns()
        # By how many bytes of the marker the text ends with.
        self._masks = [_pack(free, ids) for ids in overruns] or [_pack(free, [])]

    def mask(self, tail: bytes) -> bytes:
        """What may follow a text that ends with `tail`, in the form of GrammarState.mask."""
        mask = self._masks[0]
        for num_done in range(1, len(self._masks)):
            if tail.endswith(self._text[:num_done]):
                mask = mask & self._masks[num_done]
        return mask.tobytes()

    def append(self, tail: bytes, token_id: int) -> bytes | None:
        """The tail with another token; None if the marker is complete. Raises GrammarError."""
        if self._token_id is not None:
            return None if token_id == self._token_id else b""
        if token_id in self._special_ids and self._tokens[token_id] not in self._text:
            return b""
        tail += self._tokens[token_id]
        place = tail.find(self._text)
        if place < 0:
            return tail[-len(self._text) + 1 :] if len(self._text) > 1 else b""
        if place + len(self._text) != len(tail):
            raise GrammarError(f"a token goes on behind {self._text.decode()!r}")
        return None

    def _overruns(self) -> list[list[int]]:
        """For each number of bytes that are done: tokens that complete the marker and go on."""
        last = self._text[-1:]
        candidates = [
            i
            for i, token in enumerate(self._tokens)
            if last in token[:-1] and i not in self._special_ids
        ]
        overruns = []
        for num_done in range(len(self._text)):
            rest = self._text[num_done:]
            ids = []
            for i in candidates:
                place = self._tokens[i].find(rest)
                is_completing = place == 0 if num_done else place >= 0
                if is_completing and place + len(rest) < len(self._tokens[i]):
                    ids.append(i)
            overruns.append(ids)
        return overruns


def _pack(free: npt.NDArray[np.bool_], without: list[int]) -> npt.NDArray[np.uint8]:
    mask = free.copy()
    mask[without] = False
    return np.packbits(mask, bitorder="little")
