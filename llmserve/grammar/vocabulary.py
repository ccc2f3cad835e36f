"""A model's vocabulary in the form that llguidance computes masks over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper


class VocabularySource(Protocol):
    """What is read here of llmserve.tokenizer.Tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Vocabulary:
    """Immutable. Building one holds the GIL, for about 0.6 s where there are 262144 tokens."""

    def __init__(self, source: VocabularySource, eos_token_ids: Sequence[int]) -> None:
        """Raises ValueError without an end-of-sequence token: no output could end."""
        if not eos_token_ids:
            raise ValueError("the model has no end-of-sequence token, so no grammar could end")
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokens = [source.token_bytes(i) for i in range(source.vocab_size)]
        special = [i for i in range(source.vocab_size) if source.is_special(i)]
        self.special_ids = frozenset((*special, *eos_token_ids))
        texts = {self.tokens[i].decode("utf-8", "replace"): i for i in sorted(self.special_ids)}
        self._special_texts = {text: i for text, i in texts.items() if text}
        longest_first = sorted(self._special_texts, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        speller = _Speller(source, self.tokens, self.special_ids, self.eos_token_ids[0])
        self.guide = LLTokenizer(TokenizerWrapper(speller), eos_token=list(eos_token_ids))
        speller.fallback = self.guide

    def special_id(self, text: str) -> int | None:
        """The special token that is spelled `text`."""
        return self._special_texts.get(text)

    def split(self, text: str) -> list[str | int]:
        """The text with special tokens as their ids; of those at one place the longest."""
        parts = self._special_pattern.split(text)
        return [self._special_texts.get(part, part) for part in parts if part]


class _Speller:
    """Spells text that a grammar leaves no choice in, with the tokens that the model would use.

    The attributes are those that llguidance's TokenizerWrapper reads.
    """

    bos_token_id = None

    def __init__(
        self,
        source: VocabularySource,
        tokens: list[bytes],
        special_ids: frozenset[int],
        eos_token_id: int,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_token_id
        self.fallback: LLTokenizer | None = None
        self._source = source
        self._special_ids = special_ids

    def __call__(self, raw: bytes) -> list[int]:
        """Ids of ordinary tokens whose bytes are `raw`. The text goes on from another one.

        Some tokenizers put a space before a text, but not after a newline.
        """
        text = raw.decode("utf-8", "replace")
        for head in (b"", b"\n"):
            ids = self._source.encode(head.decode() + text, add_special_tokens=False)
            tail = self._drop(ids, (head, b" " + head))
            if tail is not None and b"".join([self.tokens[i] for i in tail]) == raw:
                return tail
        return self.fallback.greedy_tokenize(text) if self.fallback is not None else []

    def _drop(self, ids: list[int], heads: tuple[bytes, ...]) -> list[int] | None:
        """Ids without the leading ones that spell a head; None if there are none, or specials."""
        if not self._special_ids.isdisjoint(ids):
            return None
        if not heads[0]:
            return ids
        spelled = b""
        for position, token_id in enumerate(ids):
            spelled += self.tokens[token_id]
            if spelled in heads and spelled.endswith(heads[0]):
                return ids[position + 1 :]
        return None
