"""SentencePiece vocabularies of GGUF files, against sentencepiece and tokenizers."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from llmserve.errors import RequestError, StartupError
from llmserve.files.demo import demo_model_path
from llmserve.files.gguf import GGUFFile
from llmserve.tokenizer.gguf_spm import GGUFSpmTokenizer, _model_proto
from llmserve.tokenizer.gguf_vocab import GGUFVocab
from tests.pauses import pauses_during
from tests.unit.tokenizer_builders import (
    SPECIAL_TEXTS,
    TEXTS,
    spm_backend,
    spm_metadata,
    train_spm,
)


@cache
def trained(add_dummy_prefix: bool) -> bytes:
    return train_spm(add_dummy_prefix=add_dummy_prefix)


@cache
def tokenizer(add_dummy_prefix: bool) -> GGUFSpmTokenizer:
    return GGUFSpmTokenizer(spm_metadata(trained(add_dummy_prefix)))


@cache
def reference(add_dummy_prefix: bool) -> Tokenizer:
    return spm_backend(spm_metadata(trained(add_dummy_prefix)))


@cache
def demo_metadata() -> dict[str, Any]:
    return GGUFFile.open(demo_model_path(print)).metadata


@cache
def demo_tokenizer() -> GGUFSpmTokenizer:
    return GGUFSpmTokenizer(demo_metadata())


def small_demo_metadata() -> dict[str, Any]:
    """The demo vocabulary less its rarer pieces, in the same order."""
    whole = demo_metadata()
    types = whole["tokenizer.ggml.token_type"]
    tokens = whole["tokenizer.ggml.tokens"]
    keep = [i for i in range(len(tokens)) if i < 20_000 or types[i] != 1 or len(tokens[i]) == 1]
    return {
        **whole,
        "tokenizer.ggml.tokens": [tokens[i] for i in keep],
        "tokenizer.ggml.token_type": types[keep],
        "tokenizer.ggml.scores": whole["tokenizer.ggml.scores"][keep],
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_ids_equal_those_of_the_original_sentencepiece_model(
    text: str, add_dummy_prefix: bool
) -> None:
    original = sentencepiece.SentencePieceProcessor(model_proto=trained(add_dummy_prefix))

    ids = tokenizer(add_dummy_prefix).encode(text, add_special_tokens=False)

    assert ids == original.Encode(text)


@pytest.mark.parametrize("text", TEXTS + SPECIAL_TEXTS)
@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_ids_and_text_equal_those_of_the_tokenizers_library(
    text: str, add_dummy_prefix: bool
) -> None:
    theirs = reference(add_dummy_prefix)
    ours = tokenizer(add_dummy_prefix)

    ids = ours.encode(text, add_special_tokens=False)

    assert ids == theirs.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_demo_vocabulary_gives_the_ids_of_the_tokenizers_library() -> None:
    metadata = small_demo_metadata()
    ours, theirs = GGUFSpmTokenizer(metadata), spm_backend(metadata)
    turns = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<unused99><unused9>"

    for text in [*TEXTS, turns, "<table><td>\t\t\t1</td></table>", " " * 31 + "x", "<unk>a<pad>"]:
        assert ours.encode(text, False) == theirs.encode(text).ids, text


def test_demo_vocabulary_encodes_known_texts_to_known_ids() -> None:
    # Of the model's own tokenizer.
    ids = demo_tokenizer().encode("Hello world\n\n<start_of_turn>user\n")

    assert ids == [2, 9259, 1902, 108, 105, 2364, 107]
    assert demo_tokenizer().bos_token_id == 2
    assert demo_tokenizer().eos_token_ids == (1, 106)
    assert demo_tokenizer().vocab_size == 262_144


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t<>se/▁"))))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    ours = tokenizer(False)

    ids = ours.encode(text, add_special_tokens=False)

    expected = text.replace("▁", " ")  # SentencePiece writes spaces so and cannot tell
    assert b"".join(map(ours.token_bytes, ids)) == expected.encode()
    assert ours.decode(ids, skip_special_tokens=False) == expected


def test_a_text_gets_bos_and_eos_as_the_flags_say() -> None:
    metadata = spm_metadata(trained(False))
    both = GGUFSpmTokenizer({**metadata, "tokenizer.ggml.add_eos_token": True})
    none = GGUFSpmTokenizer({**metadata, "tokenizer.ggml.add_bos_token": False})

    assert both.encode("")[0] == 1
    assert both.encode("")[-1] == 2
    assert none.encode("") == []
    assert both.encode("", add_special_tokens=False) == []


def test_special_tokens_are_left_out_of_text_unless_asked_for() -> None:
    ours = tokenizer(True)
    ids = ours.encode("<s>Hello</s>", add_special_tokens=False)

    assert ours.decode(ids) == "Hello"
    assert ours.decode(ids, skip_special_tokens=False) == "<s> Hello</s>"
    assert ours.is_special(1)
    assert not ours.is_special(ids[1])


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    ours = tokenizer(True)

    assert ours.decode([-1, ours.vocab_size, 10**12]) == ""
    assert ours.token_str(-1) == ""
    assert ours.token_bytes(ours.vocab_size) == b""


def test_the_model_made_of_a_vocabulary_holds_its_pieces_of_all_lengths() -> None:
    metadata = spm_metadata(trained(False))
    metadata["tokenizer.ggml.tokens"][-2:] = ["x" * 140, "é" * 9000]
    vocab = GGUFVocab.read(metadata)

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(_model_proto(vocab, add_space_prefix=False))

    spelled = [token.replace(" ", "▁") for token in vocab.tokens]
    assert [piece.piece for piece in proto.pieces] == spelled
    assert [piece.score for piece in proto.pieces] == vocab.scores().tolist()
    assert [piece.type for piece in proto.pieces] == vocab.types.tolist()


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+D800.*character 2"):
        tokenizer(True).encode("é \ud800 x")


def test_a_word_of_100000_characters_does_not_take_quadratic_time() -> None:
    begin = time.perf_counter()

    for word in ("abcdefghij" * 10_000, "a" * 100_000, "東" * 100_000):
        demo_tokenizer().encode(word)

    assert time.perf_counter() - begin < 5.0  # 0.1 s on an idle machine


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    text = ("The quick brown fox jumps over the lazy dog.\n" * 25_000)[: 1 << 20]
    demo_tokenizer().encode("warm up")

    pauses = pauses_during(lambda: demo_tokenizer().encode(text))

    # The median would be the whole 0.3 s, were the GIL held; single pauses may be the machine's.
    assert len(pauses) > 5
    assert sorted(pauses)[len(pauses) // 2] < 0.05


BROKEN = {
    "no tokens": ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    "tokens of another kind": ({"tokens": np.arange(600)}, "not a list of strings"),
    "no token at all": ({"tokens": []}, "has 0 tokens"),
    "types missing for some": ({"token_type": np.ones(3, np.int32)}, "3 entries for 600 tokens"),
    "scores missing for some": ({"scores": np.ones(3, np.float32)}, "3 entries for 600 tokens"),
    "unknown type": ({"token_type": np.full(600, 9, np.int32)}, "unknown value 9"),
    "scores as text": ({"scores": ["1.0"] * 600}, "not a list of numbers"),
    "scores not finite": ({"scores": np.full(600, np.nan, np.float32)}, "not all finite"),
    "bos too large": ({"bos_token_id": 600}, "bos_token_id in the GGUF file is 600"),
    "eos negative": ({"eos_token_id": -1}, "eos_token_id in the GGUF file is -1"),
    "id as text": ({"bos_token_id": "1"}, "not a whole number"),
    "flag as text": ({"add_space_prefix": "no"}, "not a boolean"),
    "a token twice": (
        {"tokens": ["a"] * 600, "token_type": np.ones(600, np.int32)},
        "is not usable: .*a is already defined",
    ),
    "bytes that are none": ({"token_type": np.full(600, 6, np.int32)}, "typed as a byte"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata_stops_the_start_with_one_sentence(name: str) -> None:
    changes, message = BROKEN[name]
    metadata = spm_metadata(trained(True))
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value

    with pytest.raises(StartupError, match=message):
        GGUFSpmTokenizer({k: v for k, v in metadata.items() if v is not None})
