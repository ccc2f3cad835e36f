"""Long texts in pieces: the ids are those of the whole text, whatever the tokenizer does."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from llmserve.tokenizer import ChunkedEncoder, Tokenizer, encode_chat
from llmserve.tokenizer.gguf_spm import GGUFSpmTokenizer
from llmserve.tokenizer.hf import HFTokenizer
from tests.unit.tokenizer_builders import (
    SPECIAL_TEXTS,
    TEXTS,
    spm_metadata,
    train_byte_level,
    train_spm,
    train_word_piece,
    with_bos,
)

# How Llama 3 finds words; Qwen's differs in the number of digits.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = ("gpt2", "llama3", "composed", "stripping", "spm", "spm with prefix", "word piece")


class SmallChunks(ChunkedEncoder):
    chunk_chars = 5


@cache
def tokenizer(name: str) -> Tokenizer:
    if name.startswith("spm"):
        return GGUFSpmTokenizer(spm_metadata(train_spm(add_dummy_prefix=name != "spm")))
    if name == "word piece":
        return HFTokenizer(train_word_piece(), {})
    if name == "gpt2":
        return HFTokenizer(with_bos(train_byte_level()), NAMED)
    normalizer = normalizers.NFC() if name == "composed" else None
    backend = train_byte_level(LLAMA3_WORDS, normalizer=normalizer)
    if name == "stripping":
        backend.add_tokens([AddedToken("fox", lstrip=True), AddedToken("dog", rstrip=True)])
    return HFTokenizer(with_bos(backend), NAMED)


@cache
def encoder(name: str) -> ChunkedEncoder:
    return SmallChunks(tokenizer(name))


words = st.sampled_from(
    [
        *TEXTS,
        *SPECIAL_TEXTS,
        "the fox",
        "\nfox",
        "dog\n",
        "<tag>",
        "<s>",
        "\n",
        " ",
        "\u0301",
        "｜x y｜",
        "1",
        "é",
    ]
)
texts = st.lists(words | st.text(max_size=5), max_size=8).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=texts)
@example(text="  two  spaces   three CamelCaseAndHTTPServer snake_case_name\nfox")
def test_pieces_have_the_ids_of_the_whole(name: str, text: str) -> None:
    for add_special_tokens in (True, False):
        pieces = encoder(name).encode(text, add_special_tokens=add_special_tokens)
        whole = tokenizer(name).encode(text, add_special_tokens=add_special_tokens)
        assert [token_id for piece in pieces for token_id in piece] == whole


@pytest.mark.parametrize("name", NAMES)
@given(text=texts)
def test_pieces_of_a_conversation_have_one_bos_as_the_whole(name: str, text: str) -> None:
    pieces = encoder(name).encode_chat(text)

    assert [i for piece in pieces for i in piece] == encode_chat(tokenizer(name), text)


@pytest.mark.parametrize(
    ("name", "num_pieces"), [("gpt2", 20), ("llama3", 20), ("spm", 40), ("spm with prefix", 1)]
)
def test_texts_are_cut_at_lines_where_the_tokenizer_allows_it(name: str, num_pieces: int) -> None:
    pieces = list(encoder(name).encode("Watch the fox.\n" * 20, add_special_tokens=False))

    assert len([piece for piece in pieces if piece]) == num_pieces


def test_texts_are_cut_between_words_unless_a_token_spans_them() -> None:
    text = "the quick brown fox " * 5

    assert len(list(encoder("spm").encode(text, add_special_tokens=False))) > 10
    # Here one of the added tokens has a space in it.
    assert len(list(encoder("gpt2").encode(text, add_special_tokens=False))) == 3
