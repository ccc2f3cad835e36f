"""Fill-in-the-middle prompts of each known vocabulary; CodeLlama's against transformers."""

from __future__ import annotations

import json

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken
from transformers import CodeLlamaTokenizer

from llmserve.api.infilling import infill_prompt, infill_tokens
from llmserve.api.prompts import Prompt
from llmserve.errors import RequestError
from llmserve.tokenizer import Tokenizer
from llmserve.tokenizer.hf import HFTokenizer
from tests.byte_tokenizer import ByteTokenizer
from tests.unit.tokenizer_builders import (
    spm_backend,
    spm_metadata,
    train_byte_level,
    train_spm,
    with_bos,
)

BEFORE, AFTER = "def add(a, b):\n    return", "\n\nprint(add(1, 2))  # three"

# The formats that the models' authors give for a prompt without a repository.
FORMS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
}


def byte_level(*special: str, bos: bool = False) -> HFTokenizer:
    backend = with_bos(train_byte_level()) if bos else train_byte_level()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return HFTokenizer(backend, {"bos_token": "<s>"} if bos else {})


def infill(tokenizer: Tokenizer, before: str | list[int] = BEFORE, after: str = AFTER) -> Prompt:
    prompt = Prompt(tokenizer.encode(before), before) if isinstance(before, str) else Prompt(before)
    return infill_prompt(prompt, after, infill_tokens(tokenizer), tokenizer)


@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_prompt_is_the_text_that_the_models_authors_give(name: str, has_bos: bool) -> None:
    prefix, suffix, middle = FORMS[name]
    tokenizer = byte_level(*FORMS[name], bos=has_bos)

    prompt = infill(tokenizer)

    assert prompt.token_ids == tokenizer.encode(f"{prefix}{BEFORE}{suffix}{AFTER}{middle}")
    assert prompt.text == BEFORE


CODE = [
    (BEFORE, AFTER),
    ("x", " y"),
    ("def f(x):\n    ", "    return x"),
    (" leading and trailing ", " leading and trailing "),
    ("日本語", "🚀!"),
]


def code_llama() -> tuple[HFTokenizer, CodeLlamaTokenizer, bytes]:
    """One vocabulary as ours, as that of transformers, and as SentencePiece's model."""
    spm = train_spm(add_dummy_prefix=True)
    backend = spm_backend(spm_metadata(spm))
    model = json.loads(backend.to_str())["model"]
    theirs = CodeLlamaTokenizer(
        vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]]
    )
    special = [theirs.prefix_token, theirs.middle_token, theirs.suffix_token, theirs.eot_token]
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return HFTokenizer(with_bos(backend), {"bos_token": "<s>"}), theirs, spm


@pytest.mark.parametrize(("before", "after"), CODE)
def test_code_llamas_prompt_is_that_of_its_reference_code(before: str, after: str) -> None:
    tokenizer, _, spm = code_llama()
    reference = SentencePieceProcessor(model_proto=spm)
    # The reference encodes a suffix behind a character that it then drops, to lose the space
    # which SentencePiece puts before a text.
    num_dropped = len(reference.encode("☺"))
    suffix = reference.encode("☺" + after, out_type=str)[num_dropped:]

    prompt = infill(tokenizer, before, after)

    assert [tokenizer.token_str(token_id) for token_id in prompt.token_ids] == [
        *("<s>", "▁<PRE>", *reference.encode(before, out_type=str)),
        *("▁<SUF>", *suffix, "▁<MID>"),
    ]


@pytest.mark.parametrize(("before", "after"), [c for c in CODE if c[1].startswith(" ")])
def test_code_llamas_prompt_is_that_of_transformers(before: str, after: str) -> None:
    # It puts a space before suffixes without one, which the model's reference code does not.
    tokenizer, theirs, _ = code_llama()

    prompt = infill(tokenizer, before, after)

    names = theirs.convert_ids_to_tokens(theirs(before, suffix=after)["input_ids"])
    assert [tokenizer.token_str(token_id) for token_id in prompt.token_ids] == names


def test_token_ids_before_the_gap_are_kept() -> None:
    tokenizer = byte_level(*FORMS["qwen"])

    prompt = infill(tokenizer, [5, 6, 7], "x")

    tokens = infill_tokens(tokenizer)
    suffix = tokenizer.encode("x")
    assert prompt.token_ids == [
        *(tokens.prefix, 5, 6, 7),
        *(tokens.suffix, *suffix),
        tokens.middle,
    ]
    assert prompt.text == tokenizer.decode([5, 6, 7])


def test_padding_token_of_the_form_ends_the_middle() -> None:
    tokenizer = byte_level(*FORMS["qwen"], "<|fim_pad|>")

    assert infill_tokens(tokenizer).ends == tuple(tokenizer.encode("<|fim_pad|>"))


def test_vocabulary_without_such_tokens_is_refused() -> None:
    for tokenizer in (ByteTokenizer(), byte_level("<|fim_prefix|>", "<|fim_suffix|>")):
        with pytest.raises(RequestError, match="suffix needs a model") as refusal:
            infill_tokens(tokenizer)

        assert refusal.value.param == "suffix"
