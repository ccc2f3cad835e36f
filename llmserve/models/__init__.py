"""Decoders: configuration, weights, forward pass. Knows no requests."""

from llmserve.layers import LayerCache
from llmserve.models.config import DecoderConfig, LayerConfig
from llmserve.models.decoder import Decoder, ForwardBatch
from llmserve.models.loader import build_decoder, load_kv_scales, read_model
from llmserve.models.weights import Weights

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ForwardBatch",
    "LayerCache",
    "LayerConfig",
    "Weights",
    "build_decoder",
    "load_kv_scales",
    "read_model",
]
