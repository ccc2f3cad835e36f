"""DecoderConfig from a Hugging Face config.json.

Reads the forms of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters, by layer type
where layers differ), and text_config of multimodal models. Defaults of absent keys are those of
transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.errors import StartupError
from llmserve.layers import RopeConfig, RopeKind
from llmserve.models.config import (
    MAX_CONTEXT,
    DecoderConfig,
    Fields,
    LayerConfig,
    head_sizes,
)

_SOURCE = "config.json"
_KEYS = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Of keys that a config.json may leave out."""

    head_dim: int | None = None
    theta: float = 10_000.0
    sliding_window: int | None = None
    context: int | None = None
    norm_eps: float = 1e-6
    is_tied: bool = False


_FAMILIES: Mapping[str, tuple[str, _Defaults]] = {
    "LlamaForCausalLM": ("llama", _Defaults(context=2048)),
    "MistralForCausalLM": ("mistral", _Defaults(sliding_window=4096, context=4096 * 32)),
    "Qwen2ForCausalLM": ("qwen2", _Defaults(sliding_window=4096, context=32_768)),
    "Qwen3ForCausalLM": ("qwen3", _Defaults(head_dim=128, sliding_window=4096, context=32_768)),
    "GemmaForCausalLM": ("gemma", _Defaults(head_dim=256, context=8192, is_tied=True)),
    "Gemma2ForCausalLM": (
        "gemma2",
        _Defaults(head_dim=256, sliding_window=4096, context=8192, is_tied=True),
    ),
    "Gemma3ForCausalLM": (
        "gemma3",
        _Defaults(head_dim=256, theta=1e6, sliding_window=4096, context=131_072, is_tied=True),
    ),
    "Phi3ForCausalLM": ("phi3", _Defaults(context=4096, norm_eps=1e-5)),
    "SmolLM3ForCausalLM": ("smollm3", _Defaults(theta=2e6, context=32_768, is_tied=True)),
    "GraniteForCausalLM": ("granite", _Defaults(context=2048)),
    "Olmo2ForCausalLM": ("olmo2", _Defaults(context=2048, norm_eps=1e-5)),
}
_ALIASES = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}


def read_hf_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Raises StartupError for an architecture, a setting or a value that cannot be served."""
    family, defaults = _FAMILIES[_architecture(config)]
    fields = Fields(_text_config(config), _SOURCE)
    _refuse_unsupported(fields)
    sizes = head_sizes(fields, _KEYS, defaults.head_dim)
    num_layers = fields.integer("num_hidden_layers", maximum=1 << 12)
    context = fields.integer("max_position_embeddings", defaults.context, maximum=MAX_CONTEXT)
    layers = _layers(fields, family, defaults, num_layers, sizes["head_dim"], context)
    is_gemma = family.startswith("gemma")
    return DecoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", maximum=1 << 24),
        intermediate_size=fields.integer("intermediate_size"),
        **sizes,
        max_context=_max_context(family, layers, context),
        layers=layers,
        activation=_activation(fields, is_gemma),
        norm_eps=fields.number("rms_norm_eps", defaults.norm_eps, maximum=1.0),
        norm_weight_offset=1.0 if is_gemma else 0.0,
        attention_scale=_attention_scale(fields, family, sizes["head_dim"]),
        attention_softcap=(
            fields.optional_number("attn_logit_softcapping", 50.0) if family == "gemma2" else None
        ),
        logit_softcap=_logit_softcap(fields, family),
        embedding_scale=_embedding_scale(fields, family, sizes["hidden_size"]),
        residual_scale=fields.number("residual_multiplier", 1.0) if family == "granite" else 1.0,
        logit_scale=1.0 / fields.number("logits_scaling", 1.0) if family == "granite" else 1.0,
        has_qkv_bias=family == "qwen2" or fields.flag("attention_bias", False),
        has_output_bias=family != "qwen2" and fields.flag("attention_bias", False),
        has_mlp_bias=fields.flag("mlp_bias", False),
        is_tied=fields.flag("tie_word_embeddings", defaults.is_tied),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    for name in names:
        if isinstance(name, str) and _ALIASES.get(name, name) in _FAMILIES:
            return _ALIASES.get(name, name)
    supported = ", ".join(sorted(_FAMILIES))
    raise StartupError(
        f"{_SOURCE}: the architecture {names[0] if names else named!r} is not supported; "
        f"supported are {supported}"
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise StartupError(f"{_SOURCE}: text_config is not an object")
    # transformers leaves keys of text_config out where they equal its defaults for this model.
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return defaults | outer | text


def _refuse_unsupported(fields: Fields) -> None:
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.has(key) and fields.raw(key) != 0:
            raise StartupError(f"{_SOURCE}: {key} is set; mixtures of experts are not supported")
    if fields.raw("use_bidirectional_attention"):
        raise StartupError(
            f"{_SOURCE}: use_bidirectional_attention is set; only causal attention is supported"
        )


def _activation(fields: Fields, is_gemma: bool) -> str:
    key = "hidden_activation" if is_gemma else "hidden_act"
    name = fields.text(key, "gelu_pytorch_tanh" if is_gemma else "silu")
    if name not in _ACTIVATIONS:
        fields.reject(key, name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attention_scale(fields: Fields, family: str, head_dim: int) -> float:
    if family in ("gemma2", "gemma3"):
        return 1.0 / math.sqrt(fields.number("query_pre_attn_scalar", 256.0))
    if family == "granite":
        return fields.number("attention_multiplier", 1.0)
    return 1.0 / math.sqrt(head_dim)


def _logit_softcap(fields: Fields, family: str) -> float | None:
    if family == "gemma2":
        return fields.optional_number("final_logit_softcapping", 30.0)
    return fields.optional_number("final_logit_softcapping") if family == "gemma3" else None


def _embedding_scale(fields: Fields, family: str, hidden_size: int) -> float:
    if family.startswith("gemma"):
        return float(hidden_size**0.5)
    return fields.number("embedding_multiplier", 1.0) if family == "granite" else 1.0


def _layers(
    fields: Fields,
    family: str,
    defaults: _Defaults,
    num_layers: int,
    head_dim: int,
    context: int,
) -> tuple[LayerConfig, ...]:
    has_rope = _rope_layers(fields, family, num_layers)
    is_sliding = _sliding_layers(fields, family, num_layers, has_rope)
    window = _sliding_window(fields, family, defaults) if any(is_sliding) else None
    ropes: dict[bool, RopeConfig] = {}
    for sliding in set(is_sliding):
        values, theta = _rope_values(fields, family, defaults, sliding)
        ropes[sliding] = _read_rope(fields, values, theta, family, head_dim, context)
    return tuple(
        LayerConfig(window if sliding else None, ropes[sliding] if has_rope[index] else None)
        for index, sliding in enumerate(is_sliding)
    )


def _rope_layers(fields: Fields, family: str, num_layers: int) -> list[bool]:
    if family != "smollm3":
        return [True] * num_layers
    if fields.has("no_rope_layers"):
        flags = fields.raw("no_rope_layers")  # despite its name, 1 stands for rope
        if not isinstance(flags, list) or len(flags) != num_layers:
            fields.reject("no_rope_layers", flags, f"a list of {num_layers} flags")
        return [bool(flag) for flag in flags]
    interval = fields.integer("no_rope_layer_interval", 4)
    return [(index + 1) % interval != 0 for index in range(num_layers)]


def _sliding_layers(
    fields: Fields, family: str, num_layers: int, has_rope: list[bool]
) -> list[bool]:
    if family in ("llama", "gemma", "granite", "olmo2"):
        return [False] * num_layers
    if family == "mistral":
        return [True] * num_layers if _is_windowed(fields, 4096) else [False] * num_layers
    if family == "phi3":
        return [fields.has("sliding_window")] * num_layers
    if family in ("qwen2", "qwen3", "smollm3"):
        default = None if family == "smollm3" else 4096
        if not (fields.flag("use_sliding_window", False) and _is_windowed(fields, default)):
            return [False] * num_layers
    if fields.has("layer_types"):
        return _layer_types(fields, num_layers)
    if family == "smollm3":
        return [not rope for rope in has_rope]
    if family in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", 28, minimum=0)
        return [index >= first for index in range(num_layers)]
    period = fields.integer("sliding_window_pattern", 6) if family == "gemma3" else 2
    return [(index + 1) % period != 0 for index in range(num_layers)]


def _layer_types(fields: Fields, num_layers: int) -> list[bool]:
    types = fields.raw("layer_types")
    known = ("sliding_attention", "full_attention")
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not all(kind in known for kind in types)
    ):
        fields.reject("layer_types", types, f"a list of {num_layers} of {' or '.join(known)}")
    return [kind == "sliding_attention" for kind in types]


def _is_windowed(fields: Fields, default: int | None) -> bool:
    """transformers: a null switches the window off, an absent key means the default."""
    if "sliding_window" in fields.values:
        return fields.has("sliding_window")
    return default is not None


def _sliding_window(fields: Fields, family: str, defaults: _Defaults) -> int:
    return fields.integer("sliding_window", defaults.sliding_window, maximum=MAX_CONTEXT)


def _rope_values(
    fields: Fields, family: str, defaults: _Defaults, is_sliding: bool
) -> tuple[Mapping[str, Any], float]:
    """The rope settings of a kind of layer, and the base where they name none."""
    theta = defaults.theta
    local_theta = 10_000.0
    parameters = fields.raw("rope_parameters")
    if parameters is not None and not isinstance(parameters, dict):
        fields.reject("rope_parameters", parameters, "an object")
    kind = "sliding_attention" if is_sliding else "full_attention"
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        values = parameters.get(kind) or {}
        return values, local_theta if family == "gemma3" and is_sliding else theta
    if parameters:
        return parameters, fields.number("rope_theta", theta)
    if family == "gemma3" and is_sliding:
        return {}, fields.number("rope_local_base_freq", local_theta)
    scaling = fields.raw("rope_scaling") or {}
    if not isinstance(scaling, dict):
        fields.reject("rope_scaling", scaling, "an object or null")
    return scaling, fields.number("rope_theta", theta)


def _read_rope(
    fields: Fields,
    values: Mapping[str, Any],
    theta: float,
    family: str,
    head_dim: int,
    context: int,
) -> RopeConfig:
    rope = Fields(values, f"{_SOURCE} (rope settings)")
    kind = _rope_kind(rope, family)
    share = rope.number("partial_rotary_factor", _partial_factor(fields), maximum=1.0)
    if share != 1.0 and family != "phi3":
        fields.reject("partial_rotary_factor", share, "1.0 for this architecture")
    rotary_dim = int(head_dim * share)
    original = _original_context(fields, rope, family, context)
    read: dict[RopeKind, Callable[[], dict[str, Any]]] = {
        RopeKind.DEFAULT: dict,
        RopeKind.LINEAR: lambda: {"factor": rope.number("factor")},
        RopeKind.DYNAMIC: lambda: {"factor": rope.number("factor")},
        RopeKind.YARN: lambda: _yarn_values(rope, context / original),
        RopeKind.LLAMA3: lambda: _llama3_values(rope),
        RopeKind.LONGROPE: lambda: _longrope_values(rope, context / original, rotary_dim),
    }
    return RopeConfig(
        theta=rope.number("rope_theta", theta),
        rotary_dim=rotary_dim,
        max_position=context,
        kind=kind,
        original_max_position=original,
        **read[kind](),
    )


def _rope_kind(rope: Fields, family: str) -> RopeKind:
    key = "rope_type" if rope.has("rope_type") else "type"
    name = rope.text(key, "default")
    if family == "phi3" and name in ("su", "yarn"):
        name = "longrope"  # names from before the type had one
    if name not in {kind.value for kind in RopeKind}:
        rope.reject(key, name, f"one of {', '.join(kind.value for kind in RopeKind)}")
    return RopeKind(name)


def _partial_factor(fields: Fields) -> float:
    return fields.number("partial_rotary_factor", 1.0, maximum=1.0)


def _original_context(fields: Fields, rope: Fields, family: str, context: int) -> int:
    default = 4096 if family == "phi3" else context
    key = "original_max_position_embeddings"
    outer = fields if fields.has(key) or family == "phi3" else rope
    return outer.integer(key, default, maximum=MAX_CONTEXT)


def _yarn_values(rope: Fields, ratio: float) -> dict[str, Any]:
    return {
        "factor": rope.number("factor", ratio),
        "attention_factor": rope.optional_number("attention_factor"),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "is_truncated": rope.flag("truncate", True),
        "mscale": rope.number("mscale", 0.0, above=-1.0),
        "mscale_all_dim": rope.number("mscale_all_dim", 0.0, above=-1.0),
    }


def _llama3_values(rope: Fields) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.reject("high_freq_factor", high, f"above low_freq_factor, which is {low}")
    return {
        "factor": rope.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _longrope_values(rope: Fields, ratio: float, rotary_dim: int) -> dict[str, Any]:
    return {
        "factor": rope.number("factor", ratio),
        "attention_factor": rope.optional_number("attention_factor"),
        "short_factors": rope.numbers("short_factor", rotary_dim // 2),
        "long_factors": rope.numbers("long_factor", rotary_dim // 2),
    }


def _max_context(family: str, layers: tuple[LayerConfig, ...], context: int) -> int:
    """Linear, dynamic and yarn scaling stretch the context that config.json names (as in vLLM)."""
    ropes = [layer.rope for layer in layers if layer.rope is not None]
    if family == "gemma3" or not ropes:
        return context
    rope = ropes[0]
    if rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return max(context, int(context * rope.factor))
    if rope.kind is RopeKind.YARN:
        return max(context, int(rope.original_max_position * rope.factor))
    return context
