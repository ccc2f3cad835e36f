"""What checkpoints call the parameters that the decoder asks for.

The decoder's own names are the keys here ("q", "mlp_pre_norm"); a template's {i} is the layer.
Names carry no ".weight" or ".bias".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from llmserve.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class NameMap:
    """Templates by parameter, and what a checkpoint may hold beyond them."""

    templates: Mapping[str, str]
    ignored_suffixes: tuple[str, ...] = ()
    ignored_prefixes: tuple[str, ...] = field(default=())

    def name(self, parameter: str, layer: int | None = None) -> str:
        return self.templates[parameter].format(i=layer)

    def is_ignored(self, name: str) -> bool:
        return name.endswith(self.ignored_suffixes) or name.startswith(self.ignored_prefixes)


def hf_names(config: DecoderConfig, tensors: Collection[str]) -> NameMap:
    """Names in Hugging Face checkpoints; `tensors` tells where a multimodal one keeps its text."""
    root, head = "model.", "lm_head"
    for outer in ("language_model.", "model.language_model."):
        if any(name.startswith(outer) for name in tensors):
            has_inner = f"{outer}model.embed_tokens.weight" in tensors
            root = outer + ("model." if has_inner else "")
            head = outer + "lm_head" if has_inner else "lm_head"
    layer = root + "layers.{i}."
    post = config.traits.has_post_norm
    has_pre = config.traits.has_pre_norm
    return NameMap(
        templates={
            "embedding": root + "embed_tokens",
            "final_norm": root + "norm",
            "output": head,
            "attention_pre_norm": layer + "input_layernorm",
            "attention_post_norm": layer + "post_attention_layernorm",
            "mlp_pre_norm": layer
            + ("pre_feedforward_layernorm" if post and has_pre else "post_attention_layernorm"),
            "mlp_post_norm": layer + "post_feedforward_layernorm",
            "attention": layer + "self_attn",
            "qkv": layer + "self_attn.qkv_proj",
            "q": layer + "self_attn.q_proj",
            "k": layer + "self_attn.k_proj",
            "v": layer + "self_attn.v_proj",
            "o": layer + "self_attn.o_proj",
            "q_norm": layer + "self_attn.q_norm",
            "k_norm": layer + "self_attn.k_norm",
            "gate_up": layer + "mlp.gate_up_proj",
            "gate": layer + "mlp.gate_proj",
            "up": layer + "mlp.up_proj",
            "down": layer + "mlp.down_proj",
        },
        # A tied output matrix may be stored a second time.
        ignored_suffixes=("rotary_emb.inv_freq", *(["lm_head.weight"] if config.is_tied else [])),
        ignored_prefixes=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    )


def gguf_names(config: DecoderConfig) -> NameMap:
    """Names in GGUF files, after the GGUF specification's table of standard tensor names."""
    layer = "blk.{i}."
    is_phi3 = config.family == "phi3"
    return NameMap(
        templates={
            "embedding": "token_embd",
            "final_norm": "output_norm",
            "output": "output",
            "attention_pre_norm": layer + "attn_norm",
            "attention_post_norm": layer + "post_attention_norm",
            "mlp_pre_norm": layer + "ffn_norm",
            "mlp_post_norm": layer + "post_ffw_norm",
            "qkv": layer + "attn_qkv",
            "q": layer + "attn_q",
            "k": layer + "attn_k",
            "v": layer + "attn_v",
            "o": layer + "attn_output",
            "q_norm": layer + "attn_q_norm",
            "k_norm": layer + "attn_k_norm",
            # Phi-3 files keep gate and up in one matrix under the name that others use for up.
            "gate_up": layer + ("ffn_up" if is_phi3 else "ffn_gate_up"),
            "gate": layer + "ffn_gate",
            "up": layer + "ffn_up",
            "down": layer + "ffn_down",
        },
        ignored_suffixes=(
            "attn_rot_embd.weight",
            "rope_freqs.weight",
            "rope_factors_long.weight",
            "rope_factors_short.weight",
        ),
    )
