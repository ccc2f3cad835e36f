"""Tiny random checkpoints of each architecture, made by transformers from a seed.

Weights are larger than at the start of a training, so that logits spread and greedy tokens do not
hang on the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 320
_WEIGHT_STD = 0.12


@dataclass(frozen=True)
class Architecture:
    """A name and what makes a config of it; `settings` go to the config class."""

    config_class: str
    model_class: str
    settings: dict[str, Any] = field(default_factory=dict)


def _sizes(**others: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **others,
    }


def _llama(**others: Any) -> Architecture:
    return Architecture("LlamaConfig", "LlamaForCausalLM", _sizes(**others))


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.0, 1.5, 2.5, 4.0],
    "partial_rotary_factor": 0.5,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _llama(),
    "llama-tied-biased": _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-odd-head": _llama(head_dim=20),
    "mistral": Architecture(
        "MistralConfig", "MistralForCausalLM", _sizes(sliding_window=24, head_dim=32)
    ),
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM", _sizes()),
    "qwen2-windowed": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        _sizes(use_sliding_window=True, sliding_window=24, max_window_layers=1),
    ),
    "qwen3": Architecture(
        "Qwen3Config", "Qwen3ForCausalLM", _sizes(head_dim=32, tie_word_embeddings=True)
    ),
    "gemma": Architecture("GemmaConfig", "GemmaForCausalLM", _sizes(head_dim=32)),
    "gemma2": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _sizes(
            head_dim=32,
            sliding_window=24,
            num_hidden_layers=4,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=8.0,
        ),
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _sizes(
            head_dim=32,
            sliding_window=24,
            num_hidden_layers=7,
            query_pre_attn_scalar=32,
            final_logit_softcapping=12.0,
        ),
    ),
    "phi3": Architecture(
        "Phi3Config", "Phi3ForCausalLM", _sizes(sliding_window=40, rope_parameters=None)
    ),
    "phi3-longrope": Architecture(
        "Phi3Config",
        "Phi3ForCausalLM",
        _sizes(original_max_position_embeddings=128, rope_parameters=_LONGROPE),
    ),
    "smollm3": Architecture(
        "SmolLM3Config", "SmolLM3ForCausalLM", _sizes(num_hidden_layers=5, no_rope_layer_interval=4)
    ),
    "granite": Architecture(
        "GraniteConfig",
        "GraniteForCausalLM",
        _sizes(
            embedding_multiplier=6.0,
            residual_multiplier=0.4,
            attention_multiplier=0.1,
            logits_scaling=2.5,
        ),
    ),
    "olmo2": Architecture("Olmo2Config", "Olmo2ForCausalLM", _sizes()),
}

ROPE_SCALINGS: dict[str, Architecture] = {
    "linear": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        max_position_embeddings=64,
    ),
    "dynamic": _llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        max_position_embeddings=64,
    ),
    "yarn": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        max_position_embeddings=256,
    ),
    "llama3": _llama(rope_parameters=_LLAMA3_ROPE),
    "longrope": Architecture(
        "Phi3Config",
        "Phi3ForCausalLM",
        _sizes(original_max_position_embeddings=64, rope_parameters=_LONGROPE),
    ),
}


def make_model(architecture: Architecture, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights, norms and biases included."""
    settings = {key: value for key, value in architecture.settings.items() if value is not None}
    config = getattr(transformers, architecture.config_class)(**settings)
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, architecture.model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(0.0, _WEIGHT_STD, generator=generator)
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(noise)
            else:
                parameter.add_(noise)
    return model.eval()


def save_checkpoint(
    model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Writes config.json and safetensors. `options` go to save_pretrained (max_shard_size)."""
    stored = model if dtype is torch.float32 else _copy(model).to(dtype)
    stored.save_pretrained(folder, **options)
    return folder


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    copy: PreTrainedModel = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy
