"""Parts of a decoder: shapes in, shapes out, thin over llmserve.kernels.

A layer holds weights and no state of a request. Activations are of the kernels' `act_dtype`.
"""

from llmserve.layers.attention import Attention, AttentionInputs, AttentionShape
from llmserve.layers.decoder_layer import DecoderLayer, LayerCache, LayerStack
from llmserve.layers.embedding import Embedding
from llmserve.layers.linear import Linear
from llmserve.layers.mlp import MLP
from llmserve.layers.norm import AddNorm, RMSNorm
from llmserve.layers.rotary import RopeConfig, RopeKind, RotaryTable
from llmserve.layers.scratch import Scratch

__all__ = [
    "AddNorm",
    "Attention",
    "AttentionInputs",
    "AttentionShape",
    "DecoderLayer",
    "Embedding",
    "LayerCache",
    "LayerStack",
    "Linear",
    "MLP",
    "RMSNorm",
    "RopeConfig",
    "RopeKind",
    "RotaryTable",
    "Scratch",
]
