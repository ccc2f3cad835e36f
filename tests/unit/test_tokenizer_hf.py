"""Tokenizers of model folders, against transformers and the tokenizers library."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers
from transformers import AutoTokenizer

from llmserve.errors import RequestError, StartupError
from llmserve.tokenizer import encode_chat, load_tokenizer
from llmserve.tokenizer.hf import HFTokenizer, byte_alphabet
from llmserve.tokenizer.hf_folder import load_hf_folder
from tests.pauses import pauses_during
from tests.unit.tokenizer_builders import (
    SPECIAL_TEXTS,
    TEXTS,
    spm_backend,
    spm_metadata,
    train_byte_level,
    train_spm,
    train_word_piece,
    with_bos,
)

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "__type": "AddedToken"},
    "model_max_length": 10**30,
}
CONFIG_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
KINDS = ("byte level", "byte level with NFC", "spm", "spm with prefix", "word piece")


@cache
def backend_json(kind: str) -> str:
    if kind == "word piece":
        return train_word_piece().to_str()
    if kind.startswith("byte level"):
        nfc = normalizers.NFC() if "NFC" in kind else None
        return with_bos(train_byte_level(normalizer=nfc)).to_str()
    return spm_backend(spm_metadata(train_spm(add_dummy_prefix="prefix" in kind))).to_str()


def write_folder(folder: Path, kind: str, **config: Any) -> Path:
    (folder / "tokenizer.json").write_text(backend_json(kind), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    named = {"bos_token": "[CLS]", "eos_token": "[SEP]"} if kind == "word piece" else {}
    folder = write_folder(tmp_path, kind, **named)
    ours, theirs = load_hf_folder(folder), AutoTokenizer.from_pretrained(folder)

    for text in TEXTS + SPECIAL_TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


def test_what_is_added_around_a_text_is_for_tokenizer_json_to_say(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte level", add_bos_token=False, add_eos_token=True)
    ours, theirs = load_hf_folder(folder), AutoTokenizer.from_pretrained(folder)

    assert ours.encode("Hello") == theirs.encode("Hello")
    assert ours.encode("Hello")[0] == 0


def test_tokens_declared_beside_tokenizer_json_are_added(tmp_path: Path) -> None:
    size = Backend.from_str(backend_json("byte level")).get_vocab_size()
    folder = write_folder(
        tmp_path,
        "byte level",
        added_tokens_decoder={
            str(size + 1): {"content": "<late>", "special": True},
            str(size): {"content": "<early>", "special": False},
        },
    )
    ours, theirs = load_hf_folder(folder), AutoTokenizer.from_pretrained(folder)

    ids = ours.encode("a<early>b<late>c")

    assert ids == theirs.encode("a<early>b<late>c")
    assert size in ids
    assert ours.is_special(size + 1)
    assert not ours.is_special(size)
    assert ours.vocab_size == size + 2


def test_a_declared_token_with_an_impossible_id_stops_the_start(tmp_path: Path) -> None:
    write_folder(tmp_path, "byte level")
    (tmp_path / "added_tokens.json").write_text('{"<new>": 123456}')

    with pytest.raises(StartupError, match="'<new>' with the id 123456"):
        load_hf_folder(tmp_path)


def test_names_of_special_tokens_come_from_either_file(tmp_path: Path) -> None:
    write_folder(tmp_path, "byte level")
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<sep>", "bos_token": "x"}')

    ours = load_hf_folder(tmp_path, eos_token_ids=(5, 1))

    assert ours.special_tokens["pad_token"] == "<sep>"
    assert ours.special_tokens["bos_token"] == "<s>"  # tokenizer_config.json wins
    assert ours.bos_token_id == 0
    assert ours.eos_token_ids == (1, 5)


def test_eos_ids_come_from_generation_config_else_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte level")

    def eos(config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
        files = SimpleNamespace(
            tokenizer_path=folder, gguf=None, config=config, generation_config=generation_config
        )
        return load_tokenizer(files).eos_token_ids

    assert eos({"eos_token_id": 7}, {}) == (1, 7)
    assert eos({"eos_token_id": 7}, {"eos_token_id": [1, 8, 9]}) == (1, 8, 9)
    assert eos({"eos_token_id": None}, {"eos_token_id": -1}) == (1,)
    for wrong in ("7", 7.0, True, [7, "8"]):
        with pytest.raises(StartupError, match=r"^config\.json: eos_token_id is"):
            eos({"eos_token_id": wrong}, {})
    with pytest.raises(StartupError, match=r"^generation_config\.json: .*'x'; it must"):
        eos({"eos_token_id": 7}, {"eos_token_id": "x"})


def test_a_rendered_chat_never_gets_two_bos(tmp_path: Path) -> None:
    ours = load_hf_folder(write_folder(tmp_path, "byte level"))
    plain = HFTokenizer(train_byte_level(), CONFIG_TOKENS)

    with_its_own = encode_chat(ours, "<s>Hello")
    without = encode_chat(ours, "Hello")

    assert with_its_own == without == ours.encode("Hello")
    assert without[0] == 0
    assert encode_chat(plain, "Hello") == without[1:]


def test_bytes_of_tokens_are_exact() -> None:
    ours = HFTokenizer(train_byte_level(), {})
    text = "naïve 🚀 <tag>｜x y｜<s>"

    ids = ours.encode(text)

    assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert ours.token_str(ours.encode(" the")[0]).startswith("Ġ")


def test_byte_alphabet_is_that_of_the_tokenizers_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    by_code_point = {char: ord(char).to_bytes() for char in map(chr, range(128))}
    expected = {byte_level.pre_tokenize_str(c)[0][0]: raw[0] for c, raw in by_code_point.items()}

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert expected.items() <= byte_alphabet().items()


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    ours = HFTokenizer(train_byte_level(), {})

    assert ours.decode([-1, ours.vocab_size, 10**12]) == ""
    assert ours.token_bytes(-1) == b""


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    backend = train_byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)

    assert len(HFTokenizer(backend, {}).encode("one two three four five six")) > 8


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+DFFF"):
        HFTokenizer(train_byte_level(), {}).encode("a\udfff")


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    ours = HFTokenizer(train_byte_level(), {})
    text = ("The quick brown fox jumps over the lazy dog.\n" * 25_000)[: 1 << 20]
    ours.encode("warm up")

    pauses = pauses_during(lambda: ours.encode(text))

    # The median would be the whole 0.3 s, were the GIL held; single pauses may be the machine's.
    assert len(pauses) > 5
    assert sorted(pauses)[len(pauses) // 2] < 0.05


def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path) -> None:
    model = train_spm(add_dummy_prefix=True)
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    ours = load_hf_folder(tmp_path)

    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


def test_a_folder_without_tokenizer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="has no tokenizer"):
        load_hf_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Nonsense"}}'])
def test_a_damaged_tokenizer_json_stops_the_start(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(StartupError, match=r"tokenizer\.json is not usable"):
        load_hf_folder(tmp_path)


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte level")
    files = SimpleNamespace(
        tokenizer_path=tmp_path / "none", gguf=None, config={}, generation_config={}
    )

    assert load_tokenizer(files, str(folder)).bos_token_id == 0
    with pytest.raises(StartupError, match=r"--tokenizer \./nowhere"):
        load_tokenizer(files, "./nowhere")
