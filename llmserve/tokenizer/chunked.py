"""Encodes long texts in pieces that together have the ids of the whole.

A text may be cut where no token of the vocabulary can reach across: byte-pair merges left and
right of such a place do not touch each other. Candidates are line ends before a letter and spaces
between words; a vocabulary in which some token spans one of the two is not cut there, and neither
is one that treats the start of a text in its own way (a dummy space, for example). Each cut is
tried on its surroundings before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from llmserve.tokenizer.tokenizer import Tokenizer

_WINDOW = 1 << 12  # characters that are searched at once
_AROUND = 64  # characters on either side of a cut that is tried

_LETTERS = r"[^\W\d_]"
# Where to cut -> what a token that spans such a place contains, with texts to try.
_CUTS = {
    rf"(?<=\n)(?={_LETTERS})": (rf"\n{_LETTERS}", ("ab.\n", "cd")),
    r"(?<=[a-z])(?= [a-zA-Z])": (r"[a-z] [a-zA-Z]", ("The ab", " cd")),
}


class ChunkedEncoder:
    """May be used on several threads at once. The first use goes through the whole vocabulary,
    which takes tenths of a second.
    """

    chunk_chars = 1 << 16  # least characters of a piece; the vocabulary may ask for more

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        """The ids of `Tokenizer.encode`, piece by piece. Raises RequestError."""
        prefix, suffix = self._surroundings if add_special_tokens else ([], [])
        yield prefix
        for chunk in self._chunks(text):
            yield self._encode(chunk)
        yield suffix

    def encode_chat(self, text: str) -> Iterator[list[int]]:
        """The ids of `encode_chat`, piece by piece: a BOS is added only where there is none."""
        bos = self._tokenizer.bos_token_id
        is_first = bos in self._surroundings[0]
        for chunk in self._chunks(text):
            ids = self._encode(chunk)
            if is_first and bos is not None and ids[:1] != [bos]:
                yield [bos]
            is_first = False
            yield ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _chunks(self, text: str) -> Iterator[str]:
        """At least one piece, which may be empty."""
        begin, end = 0, self._next_cut(text, self.chunk_chars)
        yield text[:end]
        while end < len(text):
            begin, end = end, self._next_cut(text, end + self.chunk_chars)
            yield text[begin:end]

    def _next_cut(self, text: str, position: int) -> int:
        """The first place at or after `position` where the text can be cut; else its end."""
        while self._cut is not None and position < len(text):
            match = self._cut.search(text, position, position + _WINDOW)
            if match is None:
                position += _WINDOW
                continue
            cut = match.start()
            around = text[max(0, cut - _AROUND) : cut], text[cut : cut + _AROUND]
            if self._is_additive(*around):
                return cut
            position = cut + 1
        return len(text)

    def _is_additive(self, left: str, right: str) -> bool:
        return self._encode(left + right) == self._encode(left) + self._encode(right)

    @cached_property
    def _cut(self) -> re.Pattern[str] | None:
        tokens = map(self._tokenizer.token_bytes, range(self._tokenizer.vocab_size))
        vocabulary = [token.decode("utf-8", "replace") for token in tokens]
        cuts = [
            cut
            for cut, (spanning, sample) in _CUTS.items()
            if self._is_additive(*sample) and not _contains(vocabulary, spanning)
        ]
        return re.compile("|".join(cuts)) if cuts else None

    @cached_property
    def _surroundings(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        inner = self._encode("a")
        outer = self._tokenizer.encode("a", add_special_tokens=True)
        for begin in range(len(outer) - len(inner) + 1):
            if outer[begin : begin + len(inner)] == inner:
                return outer[:begin], outer[begin + len(inner) :]
        return [], []


def _contains(vocabulary: list[str], pattern: str) -> bool:
    spanning = re.compile(pattern)
    return any(spanning.search(text) for text in vocabulary)
