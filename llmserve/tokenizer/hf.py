"""Tokenizers of the Hugging Face `tokenizers` library: tokenizer.json and what lies beside it.

The library decodes whole texts; here most vocabularies are decoded by the bytes of their tokens
instead, which streams in constant time. Vocabularies with another decoder use the library's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

from llmserve.tokenizer.byte_decoding import BytesStreamDecoder, BytesTokenizer
from llmserve.tokenizer.tokenizer import StreamDecoder, check_encodable
from llmserve.tokenizer.window_decoding import WindowStreamDecoder

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACE_SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

# How the bytes of a token follow from its string; None: they do not.
Spelling = Literal["byte_level", "sentencepiece"] | None


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


class HFTokenizer(BytesTokenizer):
    """Wraps a backend; takes it over and switches its truncation and padding off."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`eos_token_ids` come on top of the eos_token among `special_tokens`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self._strings: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for text, token_id in vocab.items():
            self._strings[token_id] = text
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = vocab.get(special_tokens.get("bos_token", ""))
        eos_token_id = vocab.get(special_tokens.get("eos_token", ""))
        ends = (eos_token_id, *eos_token_ids)
        self.eos_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self._spelling, self.strips_first_space = _spelling(backend)
        self._alphabet = byte_alphabet()

    @property
    def vocab_size(self) -> int:
        return len(self._strings)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_encodable(text)
        # encode() keeps the GIL, the batch methods release it.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        text = self.token_str(token_id)
        if self._spelling == "byte_level":
            try:
                return bytes([self._alphabet[char] for char in text])
            except KeyError:  # an added token, which is spelled as it is
                return text.encode()
        if self._spelling == "sentencepiece":
            if _BYTE_PIECE.fullmatch(text):
                return bytes([int(text[3:5], 16)])
            return text.replace("▁", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def token_str(self, token_id: int) -> str:
        text = self._strings[token_id] if 0 <= token_id < len(self._strings) else None
        return text or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        if self._spelling is None:
            return self._decode_by_backend(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        return super().decode(ids, skip_special_tokens)

    def stream_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> StreamDecoder:
        if self._spelling is not None:
            return BytesStreamDecoder(self, prompt_ids, skip_special_tokens)
        decode = partial(
            self._decode_by_backend,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return WindowStreamDecoder(decode, skipped.__contains__, prompt_ids)

    def _decode_by_backend(
        self, ids: list[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str:
        ids = [i for i in ids if 0 <= i < len(self._strings)]
        if skip_special_tokens or spaces_between_special_tokens:
            return self._decode_run(ids, skip_special_tokens)
        parts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if self.is_special(token_id):
                parts += [self._decode_run(run, False), self.token_str(token_id)]
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._decode_run(run, False)])

    def _decode_run(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _spelling(backend: Backend) -> tuple[Spelling, bool]:
    """How tokens are spelled, and whether decoding drops a first space."""
    if backend.decoder is None:
        return None, False
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return "byte_level", False
    if steps[:1] == [_REPLACE_SPACE] and _types(steps[1:3]) == ["ByteFallback", "Fuse"]:
        if not steps[3:]:
            return "sentencepiece", False
        if steps[3:] == [_STRIP_SPACE]:
            return "sentencepiece", True
    return None, False


def _types(steps: list[dict[str, Any]]) -> list[str]:
    return [step["type"] for step in steps]
