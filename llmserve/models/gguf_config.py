"""DecoderConfig from the metadata and the tensor list of a GGUF file.

Keys are those of the GGUF specification. What llama.cpp knows by architecture and the file does
not say (Gemma 3's pattern of layers and its local rope base, SmolLM3's layers without rope) is
set here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmserve.errors import StartupError
from llmserve.files.gguf import GGUFFile
from llmserve.layers import RopeConfig, RopeKind
from llmserve.models.config import (
    MAX_CONTEXT,
    DecoderConfig,
    Fields,
    LayerConfig,
    head_sizes,
)

_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
)
# Their q and k rows are stored so that rotary pairs are neighbours.
_INTERLEAVED = ("llama", "smollm3", "granite")
_KEYS = {
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
_NUM_LAYERS_GEMMA2_27B = 46
_NUM_LAYERS_GEMMA3_27B = 62


def read_gguf_config(file: GGUFFile) -> DecoderConfig:
    """Raises StartupError for an architecture, a setting or a value that cannot be served."""
    family = _family(file.metadata)
    fields = Fields(_scalars(file.metadata), "GGUF metadata", family + ".")
    if fields.has("expert_count") and fields.raw("expert_count") != 0:
        raise StartupError(
            f"GGUF metadata: {family}.expert_count is {fields.raw('expert_count')}; "
            "mixtures of experts are not supported"
        )
    sizes = head_sizes(fields, _KEYS, None)
    value_length = fields.integer("attention.value_length", sizes["head_dim"])
    if value_length != sizes["head_dim"]:
        fields.reject(
            "attention.value_length", value_length, f"the key length, {sizes['head_dim']}"
        )
    num_layers = fields.integer("block_count", maximum=1 << 12)
    context = fields.integer("context_length", maximum=MAX_CONTEXT)
    is_gemma = family.startswith("gemma")
    is_granite = family == "granite"
    return DecoderConfig(
        family=family,
        vocab_size=_vocab_size(file),
        intermediate_size=fields.integer("feed_forward_length"),
        **sizes,
        max_context=context,
        layers=_layers(file, fields, family, num_layers, sizes["head_dim"], context),
        activation="gelu_tanh" if is_gemma else "silu",
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", maximum=1.0),
        # Gemma's norm weights are stored with the 1 already added.
        norm_weight_offset=0.0,
        attention_scale=_attention_scale(fields, family, num_layers, sizes),
        attention_softcap=(
            fields.number("attn_logit_softcapping", 50.0) if family == "gemma2" else None
        ),
        logit_softcap=_logit_softcap(fields, family),
        embedding_scale=(
            sizes["hidden_size"] ** 0.5
            if is_gemma
            else fields.number("embedding_scale", 1.0)
            if is_granite
            else 1.0
        ),
        residual_scale=fields.number("residual_scale", 1.0) if is_granite else 1.0,
        logit_scale=1.0 / fields.number("logit_scale", 1.0) if is_granite else 1.0,
        has_qkv_bias=_has(file, "blk.0.attn_q.bias") or _has(file, "blk.0.attn_qkv.bias"),
        has_output_bias=_has(file, "blk.0.attn_output.bias"),
        has_mlp_bias=_has(file, "blk.0.ffn_down.bias"),
        is_tied=not _has(file, "output.weight"),
    )


def _family(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise StartupError(
            f"GGUF metadata: the architecture {name!r} is not supported; "
            f"supported are {', '.join(_FAMILIES)}"
        )
    return str(name)


def _scalars(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Model settings only; a per-layer array whose entries are equal counts as a scalar."""
    scalars = {}
    for key, value in metadata.items():
        if key.startswith("tokenizer."):
            continue
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                continue
            value = value[0].item()
        scalars[key] = value
    return scalars


def _has(file: GGUFFile, name: str) -> bool:
    return name in file.tensors


def _vocab_size(file: GGUFFile) -> int:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise StartupError("GGUF file: the matrix token_embd.weight is missing")
    return int(tensor.shape[0])


def _attention_scale(
    fields: Fields, family: str, num_layers: int, sizes: Mapping[str, int]
) -> float:
    is_27b = (family, num_layers) in (
        ("gemma2", _NUM_LAYERS_GEMMA2_27B),
        ("gemma3", _NUM_LAYERS_GEMMA3_27B),
    )
    if is_27b:
        return math.sqrt(sizes["num_heads"] / sizes["hidden_size"])
    if family == "granite":
        return fields.number("attention.scale", 1.0)
    return 1.0 / math.sqrt(sizes["head_dim"])


def _logit_softcap(fields: Fields, family: str) -> float | None:
    if family == "gemma2":
        return fields.number("final_logit_softcapping", 30.0)
    return fields.optional_number("final_logit_softcapping") if family == "gemma3" else None


def _layers(
    file: GGUFFile, fields: Fields, family: str, num_layers: int, head_dim: int, context: int
) -> tuple[LayerConfig, ...]:
    window = None
    if fields.has("attention.sliding_window") and fields.raw("attention.sliding_window") != 0:
        window = fields.integer("attention.sliding_window", maximum=MAX_CONTEXT)
    elif family == "gemma2":
        window = 4096
    period = {"gemma2": 2, "gemma3": 6}.get(family, 0)
    if family == "gemma3" and fields.has("attention.sliding_window_pattern"):
        period = fields.integer("attention.sliding_window_pattern")
    rope = _read_rope(file, fields, family, head_dim, context)
    local = rope
    if family == "gemma3":
        local_theta = fields.number("rope.freq_base_swa", 10_000.0)
        local = RopeConfig(theta=local_theta, rotary_dim=rope.rotary_dim, max_position=context)
    layers = []
    for index in range(num_layers):
        is_sliding = window is not None and (period == 0 or (index + 1) % period != 0)
        has_rope = family != "smollm3" or (index + 1) % 4 != 0
        layer_rope = (local if is_sliding else rope) if has_rope else None
        layers.append(LayerConfig(window if is_sliding else None, layer_rope))
    return tuple(layers)


def _read_rope(
    file: GGUFFile, fields: Fields, family: str, head_dim: int, context: int
) -> RopeConfig:
    rotary_dim = fields.integer("rope.dimension_count", head_dim, maximum=head_dim)
    original = fields.integer("rope.scaling.original_context_length", context, maximum=MAX_CONTEXT)
    common: dict[str, Any] = {
        "theta": fields.number("rope.freq_base", 10_000.0),
        "rotary_dim": rotary_dim,
        "max_position": context,
        "is_interleaved": family in _INTERLEAVED,
        "original_max_position": original,
    }
    long = _factors(file, "rope_factors_long.weight", rotary_dim)
    if long is not None:
        short = _factors(file, "rope_factors_short.weight", rotary_dim) or long
        return RopeConfig(
            **common,
            kind=RopeKind.LONGROPE,
            factor=context / original,
            attention_factor=fields.optional_number("rope.scaling.attn_factor"),
            short_factors=short,
            long_factors=long,
        )
    freqs = _factors(file, "rope_freqs.weight", rotary_dim)
    if freqs is not None:
        # Llama 3's scaling, already worked out per dimension.
        return RopeConfig(
            **common,
            kind=RopeKind.LONGROPE,
            attention_factor=1.0,
            short_factors=freqs,
            long_factors=freqs,
        )
    return RopeConfig(**common, **_scaling(fields))


def _scaling(fields: Fields) -> dict[str, Any]:
    default = "linear" if fields.has("rope.scale_linear") else "none"
    kind = fields.text("rope.scaling.type", default)
    if kind == "none":
        return {}
    if kind == "linear":
        key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
        return {"kind": RopeKind.LINEAR, "factor": fields.number(key)}
    if kind == "yarn":
        return {
            "kind": RopeKind.YARN,
            "factor": fields.number("rope.scaling.factor"),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    fields.reject("rope.scaling.type", kind, "none, linear, yarn, or longrope with its tensors")
    raise AssertionError("reject raises")


def _factors(file: GGUFFile, name: str, rotary_dim: int) -> tuple[float, ...] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.ggml_type != 0 or tuple(tensor.shape) != (rotary_dim // 2,):
        raise StartupError(
            f"GGUF file: {name} must have {rotary_dim // 2} float32 values, not type "
            f"{tensor.ggml_type} and shape {tuple(tensor.shape)}"
        )
    values = np.frombuffer(file.data(name).tobytes(), dtype="<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise StartupError(f"GGUF file: {name} has values that are not above 0")
    return tuple(float(value) for value in values)
