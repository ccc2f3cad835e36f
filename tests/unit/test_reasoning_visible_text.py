"""The text that parsers read: hidden by token, not by spelling, and counted by token."""

from __future__ import annotations

import pytest

from llmserve.api.visible_text import VisibleText
from llmserve.core import OutputDelta
from llmserve.reasoning_parsers import PARSERS
from tests.byte_tokenizer import ByteTokenizer

EOS = 256  # spelled <eos>


class NamedTokenizer(ByteTokenizer):
    """Bytes, the end, and a marker that is a special token."""

    vocab_size = 258

    def token_bytes(self, token_id: int) -> bytes:
        return b"<think>" if token_id == 257 else super().token_bytes(token_id)


TOKENIZER = NamedTokenizer()


def make_text() -> VisibleText:
    return VisibleText(TOKENIZER, lambda token_id: token_id == EOS)


def deltas(tokens: list[int], sizes: list[int]) -> list[OutputDelta]:
    """One token each; the text comes in other portions, as stop strings hold it back."""
    texts = [TOKENIZER.token_bytes(token).decode() for token in tokens]
    whole, result = "".join(texts), []
    for token, text, size in zip(tokens, texts, sizes, strict=True):
        result.append(OutputDelta(0, whole[:size], [token], [text]))
        whole = whole[size:]
    result[-1].text += whole
    return result


@pytest.mark.parametrize(
    "sizes", [[7, 1, 5, 1, 1], [0, 0, 0, 0, 0], [7, 0, 3, 4, 0], [3, 5, 1, 1, 1]]
)
def test_special_tokens_are_taken_out_wherever_the_text_is_cut(sizes: list[int]) -> None:
    text = make_text()

    parts = [text.feed(delta) for delta in deltas([257, ord("a"), EOS, ord("b"), EOS], sizes)]

    assert "".join(parts) == "<think>ab"


def test_text_that_spells_a_special_token_stays() -> None:
    text = make_text()

    parts = [text.feed(delta) for delta in deltas(list(b"a<eos>b"), [1] * 7)]

    assert "".join(parts) == "a<eos>b"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"abc</think>de", 3),
        (b"abc", 3),
        (b"a</thin", 7),
        (b"</think>abc", 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted_once_it_is_known_what_they_are(
    output: bytes, expected: int
) -> None:
    text, parser = make_text(), PARSERS["deepseek_r1"]("")
    counts = []

    for delta in deltas(list(output), [1] * len(output)):
        parser.feed(text.feed(delta))
        text.count_reasoning(parser, is_last=False)
        counts.append(text.num_reasoning_tokens)
    parser.flush()
    text.count_reasoning(parser, is_last=True)

    assert counts == sorted(counts)
    assert text.num_reasoning_tokens == expected


def test_hidden_token_does_not_move_the_others() -> None:
    text, parser = make_text(), PARSERS["deepseek_r1"]("")
    tokens = [ord("a"), EOS, *b"b</think>cde"]

    for delta in deltas(tokens, [len(TOKENIZER.token_bytes(token)) for token in tokens]):
        parser.feed(text.feed(delta))
    text.count_reasoning(parser, is_last=True)

    assert text.num_reasoning_tokens == 3  # the hidden one was part of the thinking


def test_first_bytes_of_a_character_count_with_it() -> None:
    text, parser = make_text(), PARSERS["deepseek_r1"]("")

    raw = "é".encode()
    for token, piece in [(raw[0], ""), (raw[1], "é"), (ord("b"), "b")]:
        parser.feed(text.feed(OutputDelta(0, piece, [token], [piece])))
        text.count_reasoning(parser, is_last=False)

    assert text.num_reasoning_tokens == 3
