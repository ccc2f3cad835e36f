"""Grammars over bytes, and texts walked through them token by token."""

from __future__ import annotations

import json
from typing import Any

from llmserve.core.grammar import Grammar
from llmserve.grammar import GrammarCompiler, GrammarError, GrammarKind, GrammarSpec
from tests.byte_tokenizer import ByteTokenizer

EOS_ID = 256


class MarkerTokenizer(ByteTokenizer):
    """Bytes, EOS, some special tokens, and some ordinary tokens of several bytes."""

    specials = ("<eos>", "<think>", "</think>", "<tool>", "</tool>")
    words = ("</t", "hink>", "k>", "k>\n", 'k>{"', "{}", "ab", "b</think>", "b</think>x")
    vocab_size = 256 + len(specials) + len(words)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return (*self.specials, *self.words)[token_id - 256].encode()

    def is_special(self, token_id: int) -> bool:
        return 256 <= token_id < 256 + len(self.specials)

    def id_of(self, text: str) -> int:
        return 256 + (*self.specials, *self.words).index(text)


def make_compiler(tokenizer: ByteTokenizer | None = None, **options: Any) -> GrammarCompiler:
    tokenizer = tokenizer or ByteTokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, (EOS_ID,), **options)


# What is refused for its size or kind must not be for the time that a busy machine takes.
COMPILER = make_compiler(timeout_s=120)


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1}


def is_text_of(grammar: Grammar, text: str | bytes) -> bool:
    """Whether the grammar allows each byte of the text, and then an end."""
    state = grammar.start()
    for byte in text.encode() if isinstance(text, str) else text:
        if byte not in allowed(state.mask()):
            return False
        state.accept(byte)
    return EOS_ID in allowed(state.mask())


def accepts(kind: GrammarKind, source: str, text: str | bytes, **options: Any) -> bool:
    return is_text_of(COMPILER.compile(GrammarSpec(kind, source, **options)), text)


def accepts_json(schema: Any, text: str, **options: Any) -> bool:
    return accepts(GrammarKind.JSON_SCHEMA, json.dumps(schema), text, **options)


def refusal(kind: GrammarKind, source: str, **options: Any) -> str:
    """The message with which the grammar is refused."""
    try:
        COMPILER.compile(GrammarSpec(kind, source, **options))
    except GrammarError as error:
        return str(error)
    raise AssertionError(f"{source!r} was compiled")
