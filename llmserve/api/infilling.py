"""Fill-in-the-middle prompts: text before and after a gap, in the form that the model learnt.

A vocabulary tells by its special tokens which form that is. Prefix-suffix-middle order (Bavarian
et al., Efficient Training of Language Models to Fill in the Middle, 2022, arXiv 2207.14255).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.api.prompts import Prompt
from llmserve.errors import RequestError
from llmserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Form:
    """Special tokens of a family of models, as its vocabulary spells them."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()  # tokens that end the middle, where the vocabulary has them
    keeps_suffix_space: bool = True  # False: the encoder would put a space before the suffix


_FORMS = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    _Form(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite Code
    _Form(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<file_sep>", "<filename>", "<repo_name>"),
    ),
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    # CodeLlama
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",), keeps_suffix_space=False),
    # DeepSeek, with its full-width bars
    _Form("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)

_PROBE = "☺"  # no vocabulary joins it with letters or spaces


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The form's tokens as ids."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    keeps_suffix_space: bool


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """Raises RequestError if the vocabulary has none of the known sets of tokens."""
    for form in _FORMS:
        ids = [_token_id(tokenizer, name) for name in (form.prefix, form.suffix, form.middle)]
        prefix, suffix, middle = ids
        if prefix is None or suffix is None or middle is None:
            continue
        ends = [_token_id(tokenizer, name) for name in form.ends]
        known = tuple(token_id for token_id in ends if token_id is not None)
        return InfillTokens(prefix, suffix, middle, known, form.keeps_suffix_space)
    raise RequestError(
        "suffix needs a model with fill-in-the-middle tokens, and the vocabulary of this one has "
        "none that this server knows; leave it out",
        param="suffix",
    )


def infill_prompt(before: Prompt, after: str, tokens: InfillTokens, tokenizer: Tokenizer) -> Prompt:
    """The prompt for the text between; its `text` is what came before the gap.

    A BOS at the beginning of `before` stays first.
    """
    ids = before.token_ids
    has_bos = bool(ids) and ids[0] == tokenizer.bos_token_id
    return Prompt(
        [
            *ids[: 1 if has_bos else 0],
            tokens.prefix,
            *ids[1 if has_bos else 0 :],
            tokens.suffix,
            *_encode_suffix(after, tokens, tokenizer),
            tokens.middle,
        ],
        tokenizer.decode(ids) if before.text is None else before.text,
    )


def _encode_suffix(text: str, tokens: InfillTokens, tokenizer: Tokenizer) -> list[int]:
    if tokens.keeps_suffix_space:
        return tokenizer.encode(text, add_special_tokens=False)
    start = tokenizer.encode(_PROBE, add_special_tokens=False)
    ids = tokenizer.encode(_PROBE + text, add_special_tokens=False)
    return ids[len(start) :]


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The token of that very name, if the vocabulary has it as one."""
    ids = tokenizer.encode(name, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and tokenizer.token_str(ids[0]) == name else None
