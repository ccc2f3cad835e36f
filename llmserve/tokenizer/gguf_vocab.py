"""Reads and checks the vocabulary in the metadata of a GGUF file. Nothing in it is trusted.

Keys and token types are those of the GGUF specification and llama.cpp's `llama_token_type`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.errors import StartupError
from llmserve.files.string_array import StringArray

_PREFIX = "tokenizer.ggml."
_MAX_TOKENS = 1 << 24
_NAMED = {  # our name -> the key's name
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
# Files seldom list every token that ends a turn; llama.cpp knows these by name, too.
_END_OF_TURN = frozenset(
    {
        "<end_of_turn>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "<|return|>",
    }
)


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, eq=False)
class GGUFVocab:
    """The vocabulary of a GGUF file; all ids in it are valid."""

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: npt.NDArray[np.int32]  # [num_tokens], values of TokenType
    named_ids: dict[str, int]  # "bos_token" -> id
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> GGUFVocab:
        """Raises StartupError naming the key that is missing or wrong."""
        tokens = read_strings(metadata, "tokens")
        if not 0 < len(tokens) <= _MAX_TOKENS:
            raise StartupError(f"the GGUF vocabulary has {len(tokens)} tokens")
        types = _read_types(metadata, len(tokens))
        named_ids = {}
        for name, key in _NAMED.items():
            token_id = _read_id(metadata, f"{key}_token_id", len(tokens))
            if token_id is not None:
                named_ids[name] = token_id
        ends = [named_ids.get("eos_token")]
        ends += [_read_id(metadata, f"{key}_token_id", len(tokens)) for key in ("eot", "eom")]
        ends += _end_of_turn_ids(tokens, types)
        unique = dict.fromkeys(token_id for token_id in ends if token_id is not None)
        return cls(metadata, tokens, types, named_ids, tuple(unique))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def special_tokens(self) -> dict[str, str]:
        return {name: self.tokens[token_id] for name, token_id in self.named_ids.items()}

    def ids_of_type(self, *types: TokenType) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return found

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(_PREFIX + name, default)
        if not isinstance(value, bool | np.bool_):
            raise StartupError(f"{_PREFIX}{name} in the GGUF file is not a boolean")
        return bool(value)

    def string(self, name: str, default: str) -> str:
        value = self.metadata.get(_PREFIX + name, default)
        if not isinstance(value, str):
            raise StartupError(f"{_PREFIX}{name} in the GGUF file is not a string")
        return value

    def scores(self) -> npt.NDArray[np.float32]:
        """[num_tokens]; all zero if the file has none."""
        value = self.metadata.get(_PREFIX + "scores")
        if value is None:
            return np.zeros(len(self), np.float32)
        scores = _read_numbers(value, "scores", len(self)).astype(np.float32)
        if not np.isfinite(scores).all():
            raise StartupError(f"{_PREFIX}scores in the GGUF file are not all finite")
        return scores


def read_strings(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    """A string array of the vocabulary. Raises StartupError."""
    value = metadata.get(_PREFIX + name)
    if value is None:
        raise StartupError(f"the GGUF file has no {_PREFIX}{name}, so no usable tokenizer")
    # A StringArray holds nothing but strings; looking at each would take as long as reading them.
    is_strings = isinstance(value, StringArray) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )
    if not is_strings:
        raise StartupError(f"{_PREFIX}{name} in the GGUF file is not a list of strings")
    strings: Sequence[str] = value
    return strings


def string_spans(
    strings: Sequence[str],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bytes, where in them the UTF-8 of each string begins, and its length in bytes."""
    if isinstance(strings, StringArray):
        return strings.spans()
    encoded = [string.encode() for string in strings]
    lengths = np.array([len(string) for string in encoded], np.int64)
    text = np.frombuffer(b"".join(encoded), np.uint8)
    return text, np.cumsum(lengths) - lengths, lengths


def _read_types(metadata: Mapping[str, Any], num_tokens: int) -> npt.NDArray[np.int32]:
    value = metadata.get(_PREFIX + "token_type")
    if value is None:
        return np.full(num_tokens, TokenType.NORMAL, np.int32)
    types = _read_numbers(value, "token_type", num_tokens)
    known = np.isin(types, list(TokenType))
    if not known.all():
        raise StartupError(
            f"{_PREFIX}token_type in the GGUF file has the unknown value {types[~known][0]}"
        )
    return types.astype(np.int32)


def _read_numbers(value: Any, name: str, num_tokens: int) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise StartupError(f"{_PREFIX}{name} in the GGUF file is not a list of numbers")
    if value.shape != (num_tokens,):
        raise StartupError(
            f"{_PREFIX}{name} in the GGUF file has {value.size} entries for {num_tokens} tokens"
        )
    return value


def _read_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise StartupError(f"{_PREFIX}{name} in the GGUF file is not a whole number")
    if not 0 <= value < num_tokens:
        raise StartupError(
            f"{_PREFIX}{name} in the GGUF file is {value}; the vocabulary has {num_tokens} tokens"
        )
    return int(value)


def _end_of_turn_ids(tokens: Sequence[str], types: npt.NDArray[np.int32]) -> list[int]:
    is_control = np.isin(types, (TokenType.CONTROL, TokenType.USER_DEFINED))
    found = {tokens[i]: i for i in np.flatnonzero(is_control).tolist() if tokens[i] in _END_OF_TURN}
    if "<|return|>" in found:  # harmony: <|end|> ends a message, after which the turn goes on
        found.pop("<|end|>", None)
    return list(found.values())
