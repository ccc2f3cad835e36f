"""Decoding token by token: the parts joined are the decoded whole."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.tokenizer import Tokenizer
from llmserve.tokenizer.gguf_spm import GGUFSpmTokenizer
from llmserve.tokenizer.hf import HFTokenizer
from tests.unit.tokenizer_builders import (
    SPECIAL_TEXTS,
    TEXTS,
    spm_backend,
    spm_metadata,
    train_byte_level,
    train_spm,
    train_word_piece,
)

NAMES = ("spm", "spm with prefix", "tokenizers spm", "byte level", "word piece")
EXACT = NAMES[:-1]  # encoding and decoding gives the text back


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "byte level":
        return HFTokenizer(train_byte_level(), {"bos_token": "<s>", "eos_token": "</s>"})
    if name == "word piece":
        return HFTokenizer(train_word_piece(), {})
    metadata = spm_metadata(train_spm(add_dummy_prefix=name == "spm with prefix"))
    if name == "tokenizers spm":
        return HFTokenizer(spm_backend(metadata), {})
    return GGUFSpmTokenizer(metadata)


def stream(
    tokenizer: Tokenizer,
    ids: list[int],
    prompt_ids: list[int] | None = None,
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> list[str]:
    decoder = tokenizer.stream_decoder(
        prompt_ids or [], skip_special_tokens, spaces_between_special_tokens
    )
    return [*(decoder.step(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=200)
@given(data=st.data())
def test_joined_steps_are_the_decoded_ids_whatever_the_ids(
    name: str, skip: bool, data: st.DataObject
) -> None:
    ours = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=40))

    parts = stream(ours, ids, skip_special_tokens=skip)

    assert "".join(parts) == ours.decode(ids, skip)


@pytest.mark.parametrize("name", EXACT)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁\ufffd")))
def test_no_step_shows_a_part_of_a_character(name: str, text: str) -> None:
    ours = tokenizer(name)

    parts = stream(ours, ours.encode(text, add_special_tokens=False), skip_special_tokens=False)

    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == ""
    assert "".join(parts) == text


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("text", TEXTS + SPECIAL_TEXTS)
def test_output_continues_the_prompt_as_if_decoded_with_it(name: str, text: str) -> None:
    ours = tokenizer(name)
    ids = ours.encode("Say: " + text, add_special_tokens=False)

    for cut in range(1, len(ids), max(1, len(ids) // 7)):
        prompt = ours.decode(ids[:cut], skip_special_tokens=False).rstrip("\ufffd")
        parts = stream(ours, ids[cut:], ids[:cut], skip_special_tokens=False)
        assert prompt + "".join(parts) == ours.decode(ids, skip_special_tokens=False)


def test_a_first_space_is_kept_after_a_prompt_and_dropped_without_one() -> None:
    ours = tokenizer("spm with prefix")
    ids = ours.encode("jumps", add_special_tokens=False)

    assert "".join(stream(ours, ids)) == "jumps"
    assert "".join(stream(ours, ids, ids)) == " jumps"
    # A prompt of nothing but BOS has no text that the output could continue.
    assert "".join(stream(ours, ids, [1])) == "jumps"


def test_an_open_character_is_held_back_and_given_up_at_the_end() -> None:
    ours = tokenizer("byte level")
    ids = ours.encode("🚀", add_special_tokens=False)
    assert len(ids) > 1

    parts = stream(ours, ids[:-1])

    assert parts == [""] * len(ids[:-1]) + ["\ufffd"]


def test_a_broken_character_becomes_text_when_the_next_one_begins() -> None:
    ours = tokenizer("spm")
    first_byte = ours.encode("\u0300", add_special_tokens=False)[0]
    letter = ours.encode("a", add_special_tokens=False)[0]

    assert stream(ours, [first_byte, letter]) == ["", "\ufffda", ""]


def test_special_tokens_are_skipped_or_spelled_out() -> None:
    ours = tokenizer("byte level")
    ids = ours.encode("<s>Hi<sep>there</s>")

    assert "".join(stream(ours, ids)) == "Hithere"
    assert "".join(stream(ours, ids, skip_special_tokens=False)) == "<s>Hi<sep>there</s>"


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_around_special_tokens_can_be_switched_off(spaces: bool) -> None:
    ours = tokenizer("word piece")
    ids = ours.encode("[CLS][SEP]the dog[SEP]")

    text = ours.decode(ids, False, spaces)

    assert text == ("[CLS] [SEP] the dog [SEP]" if spaces else "[CLS][SEP]the dog[SEP]")
    parts = stream(ours, ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert "".join(parts) == text
