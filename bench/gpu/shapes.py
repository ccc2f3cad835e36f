"""Models that are timed with random weights, and the least that their work costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.roofs import Roofs

_WEIGHT_BYTES = 2  # of bfloat16, and of a value in the KV cache


@dataclass(frozen=True, slots=True)
class Shape:
    """config: the content of config.json."""

    name: str
    config: dict[str, Any]

    @property
    def layer_values(self) -> int:
        """Of the matrices of all layers."""
        c = self.config
        hidden, q_size = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
        kv_size = c["num_key_value_heads"] * c["head_dim"]
        attention = hidden * (2 * q_size + 2 * kv_size)
        return int(c["num_hidden_layers"] * (attention + 3 * hidden * c["intermediate_size"]))

    @property
    def logit_values(self) -> int:
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def kv_bytes(self) -> int:
        """Of a token in the KV cache."""
        c = self.config
        values = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
        return int(values * _WEIGHT_BYTES)

    def attention_flops(self, num_pairs: float) -> float:
        """num_pairs: of a query and a key that it sees."""
        c = self.config
        return float(4 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"]) * (
            num_pairs
        )

    def decode_bound(self, roofs: Roofs, num_seqs: int, context: float) -> float | None:
        """The most tokens a second: each step reads all matrices and all of the KV cache."""
        values = self.layer_values + self.logit_values
        num_bytes = values * _WEIGHT_BYTES + num_seqs * context * self.kv_bytes
        flops = 2 * values * num_seqs + self.attention_flops(num_seqs * context)
        seconds = roofs.seconds(num_bytes, flops)
        return None if seconds is None else num_seqs / seconds

    def prefill_bound(self, roofs: Roofs, num_tokens: int) -> float | None:
        """The most prompt tokens a second, of one prompt; its last token alone needs logits."""
        pairs = num_tokens * (num_tokens + 1) / 2
        flops = 2 * (self.layer_values * num_tokens + self.logit_values)
        values = self.layer_values + self.logit_values
        seconds = roofs.seconds(values * _WEIGHT_BYTES, flops + self.attention_flops(pairs))
        return None if seconds is None else num_tokens / seconds

    def write(self, folder: Path) -> None:
        """config.json, all that dummy weights need."""
        (folder / "config.json").write_text(json.dumps(self.config))


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a model. context: tokens of a prompt before it is decoded from."""

    batch_sizes: tuple[int, ...]
    context: int
    num_steps: int
    num_warm_steps: int
    prefill_tokens: int
    num_prefills: int
    max_model_len: int

    @property
    def max_num_seqs(self) -> int:
        return self.batch_sizes[-1]

    @property
    def token_budget(self) -> int:
        """Of a step."""
        return max(self.prefill_tokens, 2 * self.max_num_seqs)

    def num_output_tokens(self, num_seqs: int) -> int:
        """So many that the first sequence still decodes when the steps have been measured that
        begin once the last prompt is computed."""
        free_budget = self.token_budget - num_seqs
        num_prefills = -(-num_seqs * self.context // free_budget)
        return num_prefills + self.num_warm_steps + self.num_steps + 2


FULL_LOAD = Load((1, 8, 64, 256), 512, 48, 8, 2048, 5, 4096)
TINY_LOAD = Load((1, 2), 20, 3, 1, 24, 1, 64)

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "llama-3-8b",
            _COMMON
            | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "tie_word_embeddings": False,
            },
        ),
        Shape(
            "qwen3-0.6b",
            _COMMON
            | {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": 151936,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1000000.0,
                "tie_word_embeddings": True,
            },
        ),
        Shape(
            "tiny",
            _COMMON
            | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 96,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
            },
        ),
    )
}
