"""Byte-level BPE vocabularies of GGUF files, against transformers reading the same file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from llmserve.errors import StartupError
from llmserve.files.gguf import GGUFFile
from llmserve.tokenizer import load_tokenizer
from llmserve.tokenizer.gguf_bpe import load_gguf_bpe
from tests.unit.tokenizer_builders import SPECIAL_TEXTS, TEXTS, train_byte_level

# Names that transformers knows, too; it leaves text uncomposed, which the test allows for.
PRE = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "smaug-bpe", "dbrx", "gpt-2")


@cache
def trained() -> Backend:
    return train_byte_level(r"[^\s]+|\s+")  # long words, so that merges cross every rule's splits


def metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    backend = trained()
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = backend.get_added_tokens_decoder()
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    result = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in result.items() if value is not None}


def write_gguf(path: Path, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", PRE)
def test_ids_and_text_equal_those_of_transformers(pre: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", metadata(pre, add_bos_token=True))
    files = SimpleNamespace(gguf=GGUFFile.open(path), config={}, generation_config={})
    ours = load_tokenizer(files)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    if pre in ("qwen2", "qwen35"):
        theirs.backend_tokenizer.normalizer = normalizers.NFC()

    for text in TEXTS + SPECIAL_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("pre", ["smollm", "starcoder"])
def test_each_digit_is_a_word_where_the_name_says_so(pre: str) -> None:
    reference = Backend.from_str(trained().to_str())
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ours = load_gguf_bpe(metadata(pre))

    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text).ids, text


def test_llama_3_words_that_are_tokens_need_no_merges() -> None:
    values = metadata("llama-bpe")
    size = len(values["tokenizer.ggml.tokens"])
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "xyzzyx"]
    values["tokenizer.ggml.token_type"] = np.append(values["tokenizer.ggml.token_type"], 1)

    assert load_gguf_bpe(values).encode("xyzzyx", False) == [size]
    values["tokenizer.ggml.pre"] = "qwen2"
    assert size not in load_gguf_bpe(values).encode("xyzzyx", False)


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("llama-bpe", None, [0]),
        ("llama-bpe", False, []),
        ("tekken", None, [0]),
        ("qwen2", None, []),
        ("qwen2", True, [0]),
    ],
)
def test_bos_is_added_as_the_file_or_else_the_family_says(
    pre: str, flag: bool | None, expected: list[int]
) -> None:
    assert load_gguf_bpe(metadata(pre, add_bos_token=flag)).encode("") == expected


def test_tokens_that_end_a_turn_are_found_by_key_and_by_name() -> None:
    values = metadata(eot_token_id=2)
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    size = len(tokens)
    values["tokenizer.ggml.tokens"] = [*tokens, "<|im_end|>", "<|end|>", "<|return|>"]
    values["tokenizer.ggml.token_type"] = np.append(types, [3, 3, 3])

    # <|end|> does not end a turn where <|return|> does.
    assert load_gguf_bpe(values).eos_token_ids == (1, 2, size, size + 2)


def test_an_unnamed_pre_tokenizer_is_taken_for_gpt_2_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = load_gguf_bpe(metadata(pre=None))

    assert ours.encode(TEXTS[9]) == load_gguf_bpe(metadata("gpt-2")).encode(TEXTS[9])
    assert "does not name its pre-tokenizer" in caplog.text


BROKEN = {
    "unknown pre": (
        {"pre": "klingon"},
        "'klingon', which is not supported; known are: .*llama-bpe",
    ),
    "pre of another kind": ({"pre": 3}, "pre in the GGUF file is not a string"),
    "no merges": ({"merges": None}, "has no tokenizer.ggml.merges"),
    "merge of unknown tokens": ({"merges": ["qqq zzz"]}, "merges of the GGUF file are not usable"),
    "merge of one": ({"merges": ["abc"]}, "merges of the GGUF file are not usable"),
    "token twice": ({"tokens": ["a"] * 9, "token_type": np.ones(9, np.int32)}, "a token twice"),
    "types missing": ({"token_type": np.ones(2, np.int32)}, "2 entries for"),
    "id too large": ({"eos_token_id": 99999}, "eos_token_id in the GGUF file is 99999"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata_stops_the_start_with_one_sentence(name: str) -> None:
    changes, message = BROKEN[name]

    with pytest.raises(StartupError, match=message):
        load_gguf_bpe(metadata(**changes))


def test_an_unknown_kind_of_tokenizer_stops_the_start() -> None:
    gguf_file = SimpleNamespace(metadata={"tokenizer.ggml.model": "rwkv"})
    files = SimpleNamespace(gguf=gguf_file, config={}, generation_config={})

    with pytest.raises(StartupError, match="kind 'rwkv'; supported are 'llama' and 'gpt2'"):
        load_tokenizer(files)
