"""A tokenizer whose tokens are bytes: id b is byte b, 256 ends a text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class ByteStreamDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return "" if token_id >= 256 else self._decoder.decode(bytes([token_id]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Implements llmserve.tokenizer.Tokenizer."""

    vocab_size = 257
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (256,)
    special_tokens = {"eos_token": "<eos>"}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == 256 else bytes([token_id])

    def token_str(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def is_special(self, token_id: int) -> bool:
        return token_id == 256

    def stream_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> ByteStreamDecoder:
        return ByteStreamDecoder()
