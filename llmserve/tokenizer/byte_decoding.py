"""Decoding for vocabularies in which every token stands for fixed bytes.

A text is then the UTF-8 decoding of all bytes in order. Decoding is incremental and a step costs
the length of one token. It differs from the `tokenizers` library only for bytes that are not
UTF-8, of which that library replaces a whole run where this replaces the faulty bytes.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from llmserve.tokenizer.tokenizer import StreamDecoder

_MAX_UTF8_BYTES = 4


class BytesTokenizer(ABC):
    """Decodes by joining the bytes of tokens."""

    # The encoder puts a space before a text (SentencePiece's dummy prefix); decoding drops it.
    strips_first_space: bool = False

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes: ...

    @abstractmethod
    def is_special(self, token_id: int) -> bool: ...

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a token adds to a decoded text."""
        if skip_special_tokens and self.is_special(token_id):
            return b""
        return self.token_bytes(token_id)

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        raw = b"".join([self.visible_bytes(i, skip_special_tokens) for i in ids])
        if self.strips_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def stream_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> StreamDecoder:
        return BytesStreamDecoder(self, prompt_ids, skip_special_tokens)


class BytesStreamDecoder:
    """Decodes tokens one by one; holds back at most the three bytes of an open character."""

    def __init__(
        self, tokenizer: BytesTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._prompt_tail(prompt_ids)
        self._at_start = tokenizer.strips_first_space and not tail
        # A prompt may end within a character, which the output then completes.
        self._utf8.decode(tail)

    def step(self, token_id: int) -> str:
        raw = self._tokenizer.visible_bytes(token_id, self._skip_special_tokens)
        if self._at_start and raw:
            raw = raw.removeprefix(b" ")
            self._at_start = False
        return self._utf8.decode(raw)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's last bytes to know whether a character is open."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._tokenizer.visible_bytes(token_id, self._skip_special_tokens) + tail
            if len(tail) >= _MAX_UTF8_BYTES:
                break
        return tail
