"""Small tokenizers trained on the spot, and the same vocabularies as GGUF metadata."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog, and 1234 others watch it jump again.",
    "def encode(text: str) -> list[int]:\n    return [ord(char) for char in text]",
    "Tokenizers split words: don't, we'll, I've; prices are $3.50 or 1,000,000 yen.",
    "日本語の文章と中文句子。 Привет, мир! Żółć, naïve café, résumé.",
    "<b>bold</b> and <i>italic</i>; a == b != c; {'key': [1, 2, 3]}",
] * 8

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three ",
    "trailing spaces   ",
    "\t\ttabs\t \tmixed",
    "lines\n\n\nand\r\n\r\nreturns \n end",
    "don't we'll I'VE they'd",
    "digits 1 12 123 1234567890 3.14",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass",
    "日本語のテキスト、东京 서울",
    "emoji 🚀 👨‍👩‍👧‍👦 🏳️‍🌈 end",
    "combining e\u0301 n\u0303 and \u0300 alone",
    "no-break\u00a0space, em\u2003space, \u2028 separator",
    "\x00\x01\x7f control",
    "МАЛЕНЬКИЙ Привет ŻÓŁĆ İstanbul ß",
    "CamelCaseAndHTTPServer snake_case_name",
    "x" * 300 + " " + "ab" * 200,
    "!!! ??? ... --- === ;;; //// \\\\",
    "<b>bold</b><i>x</i> < > </",
]
SPECIAL_TEXTS = [
    "<s>Hello</s>",
    "one<sep>two <sep> three<sep>",
    "<sep><sep>",
    "almost <sep or <se> or s>",
    "<tag>x</tag>\n<tag> y",
]


def train_spm(*, add_dummy_prefix: bool, vocab_size: int = 600) -> bytes:
    """A SentencePiece BPE model with byte fallback, as Llama's (with prefix) or Gemma's."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TRAINING_TEXT),
        model_writer=out,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        control_symbols=["<sep>"],
        user_defined_symbols=["<tag>", "</tag>"] if add_dummy_prefix else ["\n", "\n\n", "▁▁"],
        max_sentencepiece_length=12,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return out.getvalue()


def spm_metadata(model: bytes) -> dict[str, Any]:
    """What a converter to GGUF writes for a SentencePiece model."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in proto.pieces
        ],
        "tokenizer.ggml.scores": np.array([p.score for p in proto.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([p.type for p in proto.pieces], np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }


def spm_backend(metadata: dict[str, Any]) -> Tokenizer:
    """The `tokenizers` form of a SentencePiece vocabulary, as transformers' converters make it:
    merges follow from the order of the pieces, and special tokens are split off first.
    """
    texts, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    pieces = [text.replace(" ", "▁") for text in texts]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (i, split, piece[:split], piece[split:])
        for i, piece in enumerate(pieces)
        if types[i] in (1, 4)
        for split in range(1, len(piece))
        if piece[:split] in vocab and piece[split:] in vocab
    ]
    merges.sort(key=lambda merge: merge[:2])
    backend = Tokenizer(
        models.BPE(
            vocab, [m[2:] for m in merges], unk_token=pieces[0], fuse_unk=True, byte_fallback=True
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata["tokenizer.ggml.add_space_prefix"]:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    named = list(zip(texts, types, strict=True))
    control = [AddedToken(t, normalized=False, special=True) for t, kind in named if kind in (2, 3)]
    backend.add_special_tokens(control)
    whole = [AddedToken(t, normalized=False) for t, kind in named if kind == 4 and " " not in t]
    backend.add_tokens(whole)
    return backend


def train_byte_level(words: str | None = None, *, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE tokenizer; `words` is the expression that finds words, None: GPT-2's."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    backend.pre_tokenizer = byte_level
    if words is not None:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>", "<sep>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    backend.add_tokens(
        [AddedToken("<tag>", normalized=False), AddedToken("｜x y｜", normalized=False)]
    )
    return backend


def with_bos(backend: Tokenizer) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def train_word_piece() -> Tokenizer:
    """A tokenizer whose tokens are joined by spaces: its decoding depends on neighbours."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return backend
