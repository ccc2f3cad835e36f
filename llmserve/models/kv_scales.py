"""Scales of K and V that a Hugging Face checkpoint brings for a KV cache of fp8.

A value is stored as value / scale. The tensors have several names, by the tool that wrote them and
its age: of llm-compressor, ModelOpt, Quark and AutoFP8. Scales of what this server keeps as floats,
queries and probabilities, are known and left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmserve.errors import StartupError
from llmserve.files.safetensors import TensorInfo
from llmserve.kernels import KVScales

_TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Behind the name of the attention module; {} is the letter of K, V or Q.
_NAMES = (
    "{}_scale",
    "attn.{}_scale",
    "{}_proj.{}_scale",
    "qkv_proj.{}_scale",
    "{}_proj.output_scale",
)
_COMMON_NAMES = ("kv_scale", "attn.kv_scale")  # one scale for K and V
_UNUSED_NAMES = ("prob_scale", "attn.prob_scale", "prob_output_scale")
_ALL_NAMES = {
    *(name.replace("{}", letter) for name in _NAMES for letter in "kvq"),
    *_COMMON_NAMES,
    *_UNUSED_NAMES,
}
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "dynamic": (False,),
    "strategy": ("tensor", "attn_head"),
}


class StoredKVScales:
    """The scales among the tensors of a checkpoint, by the name of an attention module."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        data: Callable[[str], npt.NDArray[np.uint8]],
    ) -> None:
        """config: config.json."""
        settings = config.get("quantization_config", config.get("compression_config"))
        self._settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
        self._tensors = tensors
        self._data = data

    def owns(self, tensor: str) -> bool:
        """Whether it is a scale of K, V, queries or probabilities."""
        return tensor.rpartition(".self_attn.")[2] in _ALL_NAMES and ".self_attn." in tensor

    def read(self, attention: str, num_kv_heads: int) -> KVScales | None:
        """None where there are none.

        Raises StartupError for scales that do not fit the heads or are no numbers above 0, for the
        scale of K or V alone, and for scales of another type than fp8.
        """
        self._check_scheme()
        names = {letter: self._find(attention, letter) for letter in "kv"}
        if not any(names.values()):
            return None
        for letter, other in ("kv", "vk"):
            if names[letter] is None:
                raise StartupError(
                    f"tensor {attention}.{letter}_scale is missing, though there is {names[other]}"
                )
        return KVScales(*(self._scales(str(names[letter]), num_kv_heads) for letter in "kv"))

    def _check_scheme(self) -> None:
        scheme = self._settings.get("kv_cache_scheme")
        algorithm = self._settings.get("kv_cache_quant_algo")
        if algorithm not in (None, "FP8"):
            _refuse("kv_cache_quant_algo", algorithm, ("FP8",))
        if scheme is None or scheme == "static":  # AutoFP8's name of the only one that it has
            return
        if not isinstance(scheme, dict):
            _refuse("kv_cache_scheme", scheme, ("an object",))
        for key, supported in _SUPPORTED.items():
            if scheme.get(key) is not None and scheme[key] not in supported:
                _refuse(f"{key} of kv_cache_scheme", scheme[key], supported)

    def _find(self, attention: str, letter: str) -> str | None:
        own = [name.replace("{}", letter) for name in _NAMES]
        for name in (*own, *_COMMON_NAMES):
            if f"{attention}.{name}" in self._tensors:
                return f"{attention}.{name}"
        return None

    def _scales(self, name: str, num_kv_heads: int) -> torch.Tensor:
        """float32 [num_kv_heads]."""
        tensor = self._tensors[name]
        size = int(np.prod(tensor.shape, dtype=np.int64))
        if tensor.dtype not in _TORCH_TYPES or size not in (1, num_kv_heads):
            raise StartupError(
                f"tensor {name} is {tensor.dtype} {tensor.shape}; the model needs "
                f"{' or '.join(_TORCH_TYPES)} with one value or one for each of the "
                f"{num_kv_heads} KV heads"
            )
        # A copy, as files need not align numbers.
        raw = torch.from_numpy(self._data(name).copy()).view(_TORCH_TYPES[tensor.dtype])
        scales = raw.reshape(-1).float().expand(num_kv_heads).contiguous()
        for scale in scales.tolist():
            if not 0.0 < scale < math.inf:  # NaN is not
                raise StartupError(
                    f"tensor {name} holds {scale:g}; a scale must be a number above 0"
                )
        return scales


def _refuse(key: str, value: object, supported: tuple[object, ...]) -> None:
    """Raises StartupError."""
    raise StartupError(
        f"config.json: {key} is {value!r}; a KV cache of fp8 needs "
        f"{' or '.join(map(str, supported))}, one of floats does not read it"
    )
