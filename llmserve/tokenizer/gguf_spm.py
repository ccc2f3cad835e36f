"""SentencePiece BPE vocabularies in GGUF files (`tokenizer.ggml.model` "llama"): Llama 2, Mistral,
Gemma.

A GGUF file keeps pieces, scores and types, from which a SentencePiece model is put together again
and handed to the sentencepiece library. That library does not see special tokens in text, so the
text is split at them first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from llmserve.errors import StartupError
from llmserve.tokenizer.byte_decoding import BytesTokenizer
from llmserve.tokenizer.gguf_vocab import GGUFVocab, TokenType, string_spans
from llmserve.tokenizer.token_matcher import TokenMatcher
from llmserve.tokenizer.tokenizer import check_encodable

_SPACE = "▁"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_BPE = 2  # TrainerSpec.ModelType
_TAIL_BYTES = 7  # of a piece: score and type, each with its key


class GGUFSpmTokenizer(BytesTokenizer):
    """Ids equal those of the model that the file was made from.

    Where a vocabulary wants a space before a text, every part between special tokens gets one, as
    in llama.cpp and in the original ("legacy") Llama tokenizer.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Raises StartupError if the metadata describes no such vocabulary."""
        vocab = GGUFVocab.read(metadata)
        self._vocab = vocab
        self.strips_first_space = vocab.flag("add_space_prefix", True)
        self._types = vocab.types.tolist()
        special = vocab.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        self._special_ids = frozenset(special)
        # SentencePiece finds user-defined pieces itself, but each one starts a part of the text.
        whole = vocab.ids_of_type(TokenType.USER_DEFINED) if self.strips_first_space else []
        self._matcher = TokenMatcher({vocab.tokens[i]: i for i in (*special, *whole)})
        self._processor = _load(vocab, add_space_prefix=self.strips_first_space)
        self._prefix = self._added_ids("bos_token", "add_bos_token", default=True)
        self._suffix = self._added_ids("eos_token", "add_eos_token", default=False)

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    @property
    def bos_token_id(self) -> int | None:
        return self._vocab.named_ids.get("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._vocab.eos_token_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        return self._vocab.special_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_encodable(text)
        ids: list[int] = []
        for part in self._matcher.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._processor.Encode(part)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def token_bytes(self, token_id: int) -> bytes:
        text = self.token_str(token_id)
        kind = self._types[token_id] if text else TokenType.UNUSED
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED):
            text = text.replace(_SPACE, " ")
        return text.encode()

    def token_str(self, token_id: int) -> str:
        return self._vocab.tokens[token_id] if 0 <= token_id < len(self._vocab) else ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _added_ids(self, name: str, flag: str, *, default: bool) -> list[int]:
        token_id = self._vocab.named_ids.get(name)
        if token_id is None or not self._vocab.flag(flag, default):
            return []
        return [token_id]


def _load(vocab: GGUFVocab, *, add_space_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(_model_proto(vocab, add_space_prefix=add_space_prefix))
        processor.Encode("a")  # builds what is built on first use
    except (RuntimeError, ValueError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartupError(f"the vocabulary of the GGUF file is not usable: {message}") from error
    return processor


def _model_proto(vocab: GGUFVocab, *, add_space_prefix: bool) -> bytes:
    """A `sentencepiece.ModelProto`, encoded by hand: the protobuf library takes a second.

    Fields as in sentencepiece_model.proto: ModelProto.pieces 1, .trainer_spec 2,
    .normalizer_spec 3; SentencePiece.piece 1, .score 2, .type 3.
    """
    types = _proto_types(vocab)
    unk_id = types.index(TokenType.UNKNOWN)
    has_bytes = TokenType.BYTE in types
    trainer = _int_field(3, _BPE) + _int_field(35, has_bytes) + _int_field(40, unk_id)
    trainer += b"".join(_int_field(number, -1) for number in (41, 42, 43))  # bos, eos, pad: ours
    normalizer = _int_field(3, add_space_prefix) + _int_field(4, False) + _int_field(5, True)
    return _pieces(vocab, types) + _message_field(2, trainer) + _message_field(3, normalizer)


def _pieces(vocab: GGUFVocab, types: list[int]) -> bytes:
    """Field 1 of the model for every token: a head, the text, a tail. Whole arrays at a time, as a
    loop over 262,144 tokens takes 0.2 s."""
    text, begins, lengths = _piece_texts(vocab)
    distinct, kinds = np.unique(lengths, return_inverse=True)
    heads = [_piece_head(length) for length in distinct.tolist()]
    head_sizes = np.array([len(head) for head in heads])[kinds]
    ends = np.cumsum(head_sizes + lengths + _TAIL_BYTES)
    out = np.empty(ends[-1], np.uint8)
    tails = ends - _TAIL_BYTES
    for i, values in enumerate(_score_and_type_fields(vocab, types).T):
        out[tails + i] = values
    texts = tails - lengths
    for i in range(max(map(len, heads))):
        has_more = head_sizes > i
        values = np.array([head[i] if i < len(head) else 0 for head in heads], np.uint8)
        out[(texts - head_sizes + i)[has_more]] = values[kinds[has_more]]
    # The byte at place i of a text comes from `begins` + i and goes to `texts` + i.
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum())
    out[np.repeat(texts - firsts, lengths) + places] = text[
        np.repeat(begins - firsts, lengths) + places
    ]
    return out.tobytes()


def _piece_texts(
    vocab: GGUFVocab,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bytes, where in them the text of each token begins, and its length."""
    text, begins, lengths = string_spans(vocab.tokens)
    spelled = {
        token_id: token.replace(" ", _SPACE).encode()
        for token_id in vocab.ids_of_type(TokenType.USER_DEFINED)
        if " " in (token := vocab.tokens[token_id])
    }
    if not spelled:
        return text, begins, lengths
    ids = list(spelled)
    sizes = [len(new) for new in spelled.values()]
    lengths[ids] = sizes
    begins[ids] = len(text) + np.cumsum(sizes) - sizes
    return np.append(text, np.frombuffer(b"".join(spelled.values()), np.uint8)), begins, lengths


def _piece_head(length: int) -> bytes:
    """What precedes the bytes of a piece: field 1 of the model, then field 1 of the piece."""
    piece = b"\x0a" + _varint(length)
    return b"\x0a" + _varint(len(piece) + length + _TAIL_BYTES) + piece


def _score_and_type_fields(vocab: GGUFVocab, types: list[int]) -> npt.NDArray[np.uint8]:
    """Fields 2 (float) and 3 (enum) of every piece: [num_tokens, _TAIL_BYTES]."""
    tails = np.empty((len(types), _TAIL_BYTES), np.uint8)
    tails[:, 0] = 0x15
    tails[:, 1:5] = vocab.scores().astype("<f4").view(np.uint8).reshape(-1, 4)
    tails[:, 5] = 0x18
    tails[:, 6] = types
    return tails


def _proto_types(vocab: GGUFVocab) -> list[int]:
    """SentencePiece needs exactly one unknown piece; converters often type it as control."""
    types: list[int] = vocab.types.tolist()
    unknown = vocab.ids_of_type(TokenType.UNKNOWN)
    unk_id = vocab.named_ids.get("unk_token", unknown[0] if unknown else 0)
    for token_id in unknown:
        types[token_id] = TokenType.CONTROL
    types[unk_id] = TokenType.UNKNOWN
    for token_id in vocab.ids_of_type(TokenType.BYTE):
        token = vocab.tokens[token_id]
        if not _BYTE_PIECE.fullmatch(token):
            raise StartupError(
                f"token {token_id} of the GGUF file is typed as a byte but is {token[:20]!r}"
            )
    return types


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF)


def _message_field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body
