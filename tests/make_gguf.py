"""Tiny GGUF files from transformers models, laid out as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

Floats = npt.NDArray[np.float32]

_PERMUTED = ("llama", "smollm3", "granite")
_PLAIN = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WITH_POST_NORM = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    family: str,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Floats] | None = None,
) -> dict[str, Floats]:
    """Writes `model`; matrices whose rows allow it are quantised.

    metadata: more keys, without the family's prefix. tensors: more tensors.
    Returns the model's parameters as the file holds them, by their names in `model`.
    """
    writer = gguf.GGUFWriter(path, family)
    for key, value in (_metadata(model, family) | dict(metadata or {})).items():
        _add(writer, f"{family}.{key}", value)
    stored: dict[str, Floats] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = parameter.detach().numpy().astype(np.float32)
        kind = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        raw = gguf.quantize(_to_gguf(values, name, model, family), kind)
        writer.add_tensor(_name(name, family), raw, raw_dtype=kind)
        stored[name] = gguf.dequantize(gguf.quantize(values, kind), kind).reshape(values.shape)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def load_parameters(model: PreTrainedModel, values: Mapping[str, Floats]) -> None:
    """Puts what `save_gguf` returned into a model."""
    parameters = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
    model.load_state_dict(parameters, strict=False)


def _metadata(model: PreTrainedModel, family: str) -> dict[str, Any]:
    config = model.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if family in ("gemma2", "gemma3", "phi3") and config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    if family == "granite":
        values["attention.scale"] = config.attention_multiplier
        values["embedding_scale"] = config.embedding_multiplier
        values["residual_scale"] = config.residual_multiplier
        values["logit_scale"] = config.logits_scaling
    return values


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _name(name: str, family: str) -> str:
    base, _, suffix = name.rpartition(".")
    table = _PLAIN
    if family in ("gemma2", "gemma3", "olmo2"):
        table = _PLAIN | _WITH_POST_NORM
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        return f"blk.{layer}.{table[part]}.{suffix}"
    return f"{table[base]}.{suffix}"


def _to_gguf(values: Floats, name: str, model: PreTrainedModel, family: str) -> Floats:
    if family.startswith("gemma") and "norm" in name:
        return values + 1
    if family in _PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
        is_query = "q_proj" in name
        config = model.config
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        return _pair_neighbours(values, heads)
    return values


def _pair_neighbours(values: Floats, num_heads: int) -> Floats:
    """Rows i and i + head_dim / 2 of a head become rows 2i and 2i + 1."""
    head_dim = len(values) // num_heads
    halves = values.reshape(num_heads, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
