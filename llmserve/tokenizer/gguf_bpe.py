"""Byte-level BPE vocabularies in GGUF files (`tokenizer.ggml.model` "gpt2"): Llama 3, Qwen, Phi-4,
Mistral's Tekken and others.

A GGUF file keeps tokens and merges, and names the rule that splits text into words.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from llmserve.errors import StartupError
from llmserve.tokenizer.gguf_vocab import GGUFVocab, TokenType, read_strings
from llmserve.tokenizer.hf import HFTokenizer

logger = logging.getLogger(__name__)

_WORD_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORD_ENDS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORD_ENDS
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}" + _CASED_ENDS
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}" + _CASED_ENDS
)

# tokenizer.ggml.pre -> the expression that finds words, as in the models' own tokenizer.json.
_WORDS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_GPT2 = ("gpt-2", "phi-2")  # the words of GPT-2, which the library has built in
_GPT2_DIGITS = ("smollm", "starcoder", "refact", "codeshell")  # each digit is a word
# A word that is a token needs no merges to become one.
_IGNORES_MERGES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
_COMPOSES = ("qwen2", "qwen35")  # NFC first


def load_gguf_bpe(metadata: Mapping[str, Any]) -> HFTokenizer:
    """Raises StartupError if the metadata describes no such vocabulary."""
    vocab = GGUFVocab.read(metadata)
    pre = vocab.string("pre", "default")
    backend = Backend(_model(vocab, ignore_merges=pre in _IGNORES_MERGES))
    if pre in _COMPOSES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    special = vocab.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens(_added_tokens(vocab, special))
    backend.add_tokens(_added_tokens(vocab, vocab.ids_of_type(TokenType.USER_DEFINED)))
    adds_bos = vocab.flag("add_bos_token", pre in _IGNORES_MERGES)
    _add_around(backend, vocab, "bos_token" if adds_bos else None, _eos_name(vocab))
    return HFTokenizer(backend, vocab.special_tokens, vocab.eos_token_ids)


def _eos_name(vocab: GGUFVocab) -> str | None:
    return "eos_token" if vocab.flag("add_eos_token", False) else None


def _model(vocab: GGUFVocab, *, ignore_merges: bool) -> models.BPE:
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    if len(ids) != len(vocab):
        raise StartupError("the vocabulary of the GGUF file has a token twice")
    merges = [_merge(line) for line in read_strings(vocab.metadata, "merges")]
    try:
        return models.BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises no narrower type
        raise StartupError(f"the merges of the GGUF file are not usable: {error}") from error


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _WORDS:
        split = pre_tokenizers.Split(Regex(_WORDS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    if pre in _GPT2_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_words])
    if pre == "default":
        logger.warning("the GGUF file does not name its pre-tokenizer; GPT-2's splits the text")
        return with_words
    if pre in _GPT2:
        return with_words
    known = ", ".join(sorted((*_WORDS, *_GPT2, *_GPT2_DIGITS)))
    raise StartupError(
        f"the GGUF file names the pre-tokenizer {pre!r}, which is not supported; known are: "
        f"{known}; pass --tokenizer with the original model's tokenizer"
    )


def _added_tokens(vocab: GGUFVocab, ids: list[int]) -> list[AddedToken]:
    is_special = vocab.types[ids] != TokenType.USER_DEFINED
    return [
        AddedToken(vocab.tokens[i], normalized=False, special=bool(special))
        for i, special in zip(ids, is_special, strict=True)
        if vocab.tokens[i]
    ]


def _add_around(backend: Backend, vocab: GGUFVocab, bos: str | None, eos: str | None) -> None:
    """Makes the backend put a BOS before and an EOS behind a text."""
    names = [name for name in (bos, eos) if name in vocab.named_ids]
    if not names:
        return
    template = ["$A"]
    if bos in names:
        template.insert(0, vocab.tokens[vocab.named_ids["bos_token"]])
    if eos in names:
        template.append(vocab.tokens[vocab.named_ids["eos_token"]])
    pairs = [(vocab.tokens[vocab.named_ids[name]], vocab.named_ids[name]) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
