"""Builds a decoder from its configuration and its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmserve.errors import StartupError
from llmserve.files.model import ModelFiles
from llmserve.kernels import Kernels, KVScales, Matrix, Weight
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.layers import (
    MLP,
    AddNorm,
    Attention,
    AttentionShape,
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    RopeConfig,
    RotaryTable,
    Scratch,
)
from llmserve.models.config import DecoderConfig, LayerConfig, QKNorm
from llmserve.models.decoder import Decoder
from llmserve.models.gguf_config import read_gguf_config
from llmserve.models.hf_config import read_hf_config
from llmserve.models.quantization import read_quantization
from llmserve.models.weights import CheckpointWeights, DummyWeights, Weights


def read_model(
    files: ModelFiles, *, dtype: str, load_format: str, seed: int, device: str = "cpu"
) -> tuple[DecoderConfig, Weights]:
    """The model's configuration and its weights, opened but not read.

    dtype, load_format, seed: as the settings of the same name. device: where dummy weights are
    made. Raises StartupError.
    """
    if files.gguf is not None:
        config = read_gguf_config(files.gguf)
        return config, CheckpointWeights.from_gguf(files.gguf, config, dtype)
    quantization = read_quantization(files.config)
    config = read_hf_config(files.config)
    if load_format == "dummy":
        return config, DummyWeights(config, _dummy_dtype(files, dtype), seed, device)
    if files.safetensors is None:
        raise StartupError(f"{files.path} holds no weights")
    return config, CheckpointWeights.from_safetensors(
        files.safetensors, config, dtype, quantization, files.config
    )


def _dummy_dtype(files: ModelFiles, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    named = files.config.get("dtype", files.config.get("torch_dtype"))
    return named if named in ("float32", "float16", "bfloat16") else "float32"


def build_decoder(
    config: DecoderConfig, weights: Weights, max_model_len: int, kernels: Kernels
) -> Decoder:
    """Raises StartupError for missing, extra or wrongly shaped tensors.

    max_model_len: no position reaches it; see layers/rotary.py for what depends on it.
    """
    builder = _Builder(config, weights, max_model_len, kernels)
    decoder = builder.decoder()
    weights.check_all_used()
    kernels.finish_uploads()
    return decoder


def load_kv_scales(
    config: DecoderConfig, weights: Weights, kernels: Kernels
) -> list[KVScales | None]:
    """By layer, in the device's memory, for a cache of fp8; None where the checkpoint has none.

    Raises StartupError for scales that cannot be used.
    """
    scales: list[KVScales | None] = []
    for index in range(config.num_layers):
        found = weights.kv_scales(index, config.num_kv_heads)
        scales.append(None if found is None else KVScales(*map(kernels.upload_vector, found)))
    return scales


class _Builder:
    def __init__(
        self, config: DecoderConfig, weights: Weights, max_model_len: int, kernels: Kernels
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._weights = weights
        self._scratch = Scratch(kernels.device, kernels.act_dtype)
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._tables: dict[RopeConfig, RotaryTable] = {
            rope: RotaryTable(rope, max_model_len, kernels.device) for rope in ropes
        }

    def decoder(self) -> Decoder:
        config = self._config
        matrix = self._kernels.upload(
            self._weights.matrix("embedding", config.vocab_size, config.hidden_size)
        )
        return Decoder(
            self._kernels,
            Embedding(self._kernels, matrix, config.embedding_scale),
            self._input_norm(0),
            [self._layer(index, layer) for index, layer in enumerate(config.layers)],
            Linear(
                self._kernels,
                [self._output_matrix(matrix)],
                [None],
                self._scratch,
                "logits",
                is_output=True,
            ),
            list(self._tables.values()),
            self._scratch,
            logit_scale=config.logit_scale,
            logit_softcap=config.logit_softcap,
        )

    def _output_matrix(self, embedding: Matrix) -> Weight | PackedWeight | Matrix:
        if self._config.is_tied:
            return embedding
        return self._weights.matrix("output", self._config.vocab_size, self._config.hidden_size)

    def _layer(self, index: int, layer: LayerConfig) -> DecoderLayer:
        config = self._config
        after_attention = AddNorm(
            self._kernels,
            self._post_norm("attention_post_norm", index),
            self._pre_norm("mlp_pre_norm", index),
            config.residual_scale,
        )
        after_mlp = AddNorm(
            self._kernels,
            self._post_norm("mlp_post_norm", index),
            self._input_norm(index + 1),
            config.residual_scale,
        )
        return DecoderLayer(
            self._attention(index, layer), after_attention, self._mlp(index), after_mlp
        )

    def _attention(self, index: int, layer: LayerConfig) -> Attention:
        config = self._config
        num_q = config.num_heads * config.head_dim
        num_kv = config.num_kv_heads * config.head_dim
        qkv = self._fused(
            "qkv", ("q", "k", "v"), (num_q, num_kv, num_kv), index, config.has_qkv_bias
        )
        output = self._linear("o", config.hidden_size, num_q, index, config.has_output_bias)
        kind = config.traits.qk_norm
        norms = None
        if kind is not QKNorm.NONE:
            is_per_head = kind is QKNorm.PER_HEAD
            norms = (
                self._norm("q_norm", config.head_dim if is_per_head else num_q, index),
                self._norm("k_norm", config.head_dim if is_per_head else num_kv, index),
            )
        shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            layer.sliding_window,
            config.attention_softcap,
        )
        rotary = None if layer.rope is None else self._tables[layer.rope]
        return Attention(
            self._kernels,
            shape,
            qkv,
            output,
            rotary,
            self._scratch,
            norms,
            qk_norm_per_head=kind is QKNorm.PER_HEAD,
        )

    def _mlp(self, index: int) -> MLP:
        config = self._config
        size = config.intermediate_size
        gate_up = self._fused("gate_up", ("gate", "up"), (size, size), index, config.has_mlp_bias)
        down = self._linear("down", config.hidden_size, size, index, config.has_mlp_bias)
        return MLP(self._kernels, gate_up, down, config.activation, self._scratch)

    def _fused(
        self,
        fused: str,
        parts: Sequence[str],
        sizes: Sequence[int],
        index: int,
        has_bias: bool,
    ) -> Linear:
        """One matrix where the checkpoint has one, else a Linear of several."""
        if self._weights.has(fused, index):
            return self._linear(fused, sum(sizes), self._config.hidden_size, index, has_bias)
        weights = [
            self._weights.matrix(part, size, self._config.hidden_size, index)
            for part, size in zip(parts, sizes, strict=True)
        ]
        biases: list[torch.Tensor | None] = [
            self._weights.bias(part, size, index) if has_bias else None
            for part, size in zip(parts, sizes, strict=True)
        ]
        return self._make_linear(weights, biases, fused)

    def _linear(
        self, parameter: str, num_rows: int, num_cols: int, index: int, has_bias: bool
    ) -> Linear:
        weight = self._weights.matrix(parameter, num_rows, num_cols, index)
        bias = self._weights.bias(parameter, num_rows, index) if has_bias else None
        return self._make_linear([weight], [bias], parameter)

    def _make_linear(
        self,
        weights: Sequence[Weight | PackedWeight | Matrix],
        biases: Sequence[torch.Tensor | None],
        role: str,
    ) -> Linear:
        return Linear(self._kernels, weights, biases, self._scratch, role)

    def _input_norm(self, index: int) -> RMSNorm | None:
        """The norm before layer `index`; after the last layer, the final norm."""
        if index == self._config.num_layers:
            return self._norm("final_norm", self._config.hidden_size)
        return self._pre_norm("attention_pre_norm", index)

    def _pre_norm(self, parameter: str, index: int) -> RMSNorm | None:
        if not self._config.traits.has_pre_norm:
            return None
        return self._norm(parameter, self._config.hidden_size, index)

    def _post_norm(self, parameter: str, index: int) -> RMSNorm | None:
        if not self._config.traits.has_post_norm:
            return None
        return self._norm(parameter, self._config.hidden_size, index)

    def _norm(self, parameter: str, size: int, index: int | None = None) -> RMSNorm:
        weight = self._kernels.upload_vector(self._weights.norm(parameter, size, index))
        return RMSNorm(
            self._kernels, weight, self._config.norm_eps, self._config.norm_weight_offset
        )
