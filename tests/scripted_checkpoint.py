"""Real checkpoints that write chosen texts, so that a real server shows what it makes of them.

A Llama model of one layer whose weights are constructed. The prompt names a script by a token of
its own, `<|script:NAME|>`. The only attention head finds that token; what it copies from there and
the current token together select the next one:

    logits[next] = follows[current, next] + belongs[script, next]      (times a large number)

A script is cut into tokens that no other script has; special tokens and single bytes alone are
shared, and none may occur twice in a script. Prompts are encoded byte by byte, so script tokens
never occur in them.

`python -m tests.scripted_checkpoint FOLDER` writes a random model with `<think>` and `</think>`
in its vocabulary instead, for trying a server with --reasoning-parser.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmserve.tokenizer.hf import byte_alphabet
from tests.make_checkpoints import ARCHITECTURES, Architecture, make_model, save_checkpoint

EOS = "<|eos|>"
OTHER_EOS = "<|eos2|>"
ASSISTANT = "<|assistant|>"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}" + ASSISTANT
_CHUNK_BYTES = 4
_HEAD_DIM = 64
_MAX_LEN = 2048
_SHARPNESS = 16.0
_SPELLING = {byte: char for char, byte in byte_alphabet().items()}


@dataclass(frozen=True)
class Script:
    """A text to write; `is_spelled`: special tokens in it are written as ordinary text."""

    text: str
    is_spelled: bool = False


def trigger(name: str) -> str:
    """What a prompt says to get a script."""
    return f"<|script:{name}|>"


@dataclass
class Vocabulary:
    """Token texts by id: bytes, special tokens, then tokens of scripts."""

    specials: tuple[str, ...]
    tokens: list[str] = field(default_factory=list)
    _ids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in [*map(_SPELLING.__getitem__, range(256)), *self.specials]:
            self._add(text)

    def __getitem__(self, text: str) -> int:
        return self._ids[text]

    def _add(self, text: str) -> int:
        self._ids[text] = len(self.tokens)
        self.tokens.append(text)
        return self._ids[text]

    def cut(self, script: Script) -> list[int]:
        """The tokens of a script: its special tokens, and new ones for the text between them."""
        text, end = script.text, EOS
        for token in (EOS, OTHER_EOS):
            if text.endswith(token):
                text, end = text.removesuffix(token), token
        if script.is_spelled:
            return [*self._cut_text(text.encode()), self[end]]
        pattern = "|".join(map(re.escape, sorted(self.specials, key=len, reverse=True)))
        ids = []
        for part in re.split(f"({pattern})", text):
            if part in self.specials:
                ids.append(self[part])
            else:
                ids += self._cut_text(part.encode())
        return [*ids, self[end]]

    def steps(self, ids: list[int]) -> list[tuple[int, int]]:
        """Which token follows which: scripts begin behind a prompt that ends in one of these."""
        starts = (self[ASSISTANT], self[_SPELLING[ord("\n")]])
        return [*((start, ids[0]) for start in starts), *itertools.pairwise(ids)]

    def _cut_text(self, raw: bytes) -> list[int]:
        """New tokens of the bytes; known ones where there are too few bytes for new ones."""
        pieces = self._pieces(raw, frozenset())
        return [self._id_of(p) for p in pieces or (bytes([byte]) for byte in raw)]

    def _pieces(self, raw: bytes, used: frozenset[bytes]) -> list[bytes] | None:
        """`raw` in pieces that are new and differ from one another and from `used`."""
        if not raw:
            return []
        for size in (_CHUNK_BYTES, 3, 5, 2, *range(6, 40)):
            piece = raw[:size]
            if len(piece) == size and self._is_new(piece) and piece not in used:
                rest = self._pieces(raw[size:], used | {piece})
                if rest is not None:
                    return [piece, *rest]
        return None

    def _id_of(self, piece: bytes) -> int:
        spelled = "".join(_SPELLING[byte] for byte in piece)
        return self._ids[spelled] if spelled in self._ids else self._add(spelled)

    def _is_new(self, raw: bytes) -> bool:
        return "".join(_SPELLING[byte] for byte in raw) not in self._ids


def write_checkpoint(
    folder: Path,
    scripts: Mapping[str, str | Script],
    special_tokens: tuple[str, ...] = (),
    *,
    template: str = TEMPLATE,
) -> Path:
    """`special_tokens`: those of the scripts. A script that names no end gets EOS at its end."""
    triggers = tuple(map(trigger, scripts))
    vocabulary = Vocabulary((EOS, OTHER_EOS, ASSISTANT, *special_tokens, *triggers))
    sequences = []
    for script in scripts.values():
        sequences.append(vocabulary.cut(Script(script) if isinstance(script, str) else script))
    _check(dict(zip(scripts, sequences, strict=True)), vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, vocabulary, template)
    _write_weights(folder, vocabulary, sequences, triggers)
    return folder


def _check(sequences: Mapping[str, list[int]], vocabulary: Vocabulary) -> None:
    """Every script must be the only way to go on."""
    follows: dict[int, set[int]] = {}
    for ids in sequences.values():
        for current, following in vocabulary.steps(ids):
            follows.setdefault(current, set()).add(following)
    for name, ids in sequences.items():
        for current, following in vocabulary.steps(ids):
            others = follows[current] & set(ids) - {following}
            assert not others, (
                f"script {name}: {vocabulary.tokens[current]!r} is followed by "
                f"{vocabulary.tokens[following]!r} and {[vocabulary.tokens[i] for i in others]}"
            )


def _write_tokenizer(folder: Path, vocabulary: Vocabulary, template: str) -> None:
    ordinary = [t for t in vocabulary.tokens if t not in vocabulary.specials]
    ids = {text: vocabulary[text] for text in vocabulary.tokens}
    backend = Tokenizer(models.BPE(vocab={t: ids[t] for t in vocabulary.tokens}, merges=[]))
    assert len(ordinary) + len(vocabulary.specials) == len(ids)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in vocabulary.specials])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [vocabulary[EOS], vocabulary[OTHER_EOS]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _write_weights(
    folder: Path, vocabulary: Vocabulary, sequences: list[list[int]], triggers: tuple[str, ...]
) -> None:
    num_tokens, num_scripts = len(vocabulary.tokens), len(sequences)
    assert num_scripts <= _HEAD_DIM
    # One dimension per token, per script, and one that is always on.
    scripts_at, one_at = num_tokens, num_tokens + num_scripts
    size = (one_at + 1 + 63) // 64 * 64
    embedding, head = torch.zeros(num_tokens, size), torch.zeros(num_tokens, size)
    embedding[range(num_tokens), range(num_tokens)] = 1.0
    embedding[:, one_at] = 1.0
    value, output = torch.zeros(_HEAD_DIM, size), torch.zeros(size, _HEAD_DIM)
    query, key = torch.zeros(_HEAD_DIM, size), torch.zeros(_HEAD_DIM, size)
    slowest = _HEAD_DIM // 2 - 1  # this pair of dimensions is hardly rotated
    query[slowest, one_at] = 1.0
    for number, (ids, text) in enumerate(zip(sequences, triggers, strict=True)):
        key[slowest, vocabulary[text]] = _SHARPNESS
        value[number, vocabulary[text]] = 1.0
        output[scripts_at + number, number] = (2.0 / size) ** 0.5  # undoes the norm's scale
        head[ids, scripts_at + number] = 1.0
        for current, following in vocabulary.steps(ids):
            head[following, current] = 1.0
    layer = "model.layers.0."
    none = torch.zeros(64, size)
    weights = {
        "model.embed_tokens.weight": embedding,
        layer + "self_attn.q_proj.weight": query,
        layer + "self_attn.k_proj.weight": key,
        layer + "self_attn.v_proj.weight": value,
        layer + "self_attn.o_proj.weight": output,
        layer + "mlp.gate_proj.weight": none,
        layer + "mlp.up_proj.weight": none.clone(),
        layer + "mlp.down_proj.weight": torch.zeros(size, 64),
        layer + "input_layernorm.weight": torch.ones(size),
        layer + "post_attention_layernorm.weight": torch.ones(size),
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": head,
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens,
        "hidden_size": size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": _MAX_LEN,
        "rms_norm_eps": 1e-9,
        "rope_theta": 1e12,
        "tie_word_embeddings": False,
        "eos_token_id": vocabulary[EOS],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_random_checkpoint(folder: Path) -> Path:
    """A random Llama over bytes and the tokens that mark thinking."""
    vocabulary = Vocabulary((EOS, OTHER_EOS, ASSISTANT, "<think>", "</think>"))
    sizes = {
        **ARCHITECTURES["llama"].settings,
        "vocab_size": len(vocabulary.tokens),
        "max_position_embeddings": _MAX_LEN,
    }
    model = make_model(Architecture("LlamaConfig", "LlamaForCausalLM", sizes))
    save_checkpoint(model, folder)
    _write_tokenizer(folder, vocabulary, TEMPLATE)
    return folder


if __name__ == "__main__":
    print(write_random_checkpoint(Path(sys.argv[1])))
