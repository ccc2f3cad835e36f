"""Quantised Hugging Face checkpoints: what config.json says of them, and their matrices.

Which matrices are quantised shows in their tensors, so lists of modules that are not are not read.
Scales of activations are not used: these stay floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmserve.errors import StartupError
from llmserve.files.safetensors import TensorInfo
from llmserve.kernels import GGMLType
from llmserve.kernels.packed_weight import (
    AWQWeight,
    FP8Weight,
    GPTQWeight,
    Int8Weight,
    PackedWeight,
)

_SOURCE = "config.json: quantization_config"
_CODES_IN_WORD = 8  # of 4 bits, in an int32
_TORCH_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_FLOATS = ("F32", "F16", "BF16")
# Tensors beside a quantised matrix that are read with it, or that tell nothing new of it.
_SUFFIXES = (
    *(".weight", ".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".weight_scale", ".weight_scale_inv", ".input_scale"),
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantised matrices of a checkpoint are stored."""

    method: str  # awq, gptq, int8 or fp8
    zero_offset: int = 0  # of GPTQ's zero points
    has_act_order: bool = False  # the columns of GPTQ's groups are not neighbours
    block: tuple[int, int] | None = None  # rows and columns that share a scale of fp8


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """From config.json; None for a model that is not quantised.

    Raises StartupError naming the method, or the variant of it, that is not supported.
    """
    settings = config.get("quantization_config", config.get("compression_config"))
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise StartupError(f"{_SOURCE} is not an object")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise StartupError(
            f"{_SOURCE}: the method {method!r} is not supported; supported are "
            f"{', '.join(_READERS)}; take the model without quantisation, or as GGUF file"
        )
    return _READERS[method](settings)


def _require(settings: Mapping[str, Any], method: str, key: str, *supported: Any) -> None:
    """Raises StartupError unless the setting is absent or has one of these values."""
    value = settings.get(key)
    if value is not None and value not in supported:
        raise StartupError(
            f"{_SOURCE}: {method} with {key} {value!r} is not supported; "
            f"supported: {', '.join(map(str, supported))}"
        )


def _read_awq(settings: Mapping[str, Any]) -> Quantization:
    _require(settings, "awq", "bits", 4)
    _require(settings, "awq", "w_bit", 4)
    _require(settings, "awq", "version", "gemm", "GEMM")
    _require(settings, "awq", "zero_point", True)
    return Quantization("awq")


def _read_gptq(settings: Mapping[str, Any]) -> Quantization:
    _require(settings, "gptq", "bits", 4)
    _require(settings, "gptq", "checkpoint_format", "gptq", "gptq_v2")
    return Quantization(
        "gptq",
        zero_offset=0 if settings.get("checkpoint_format") == "gptq_v2" else 1,
        has_act_order=settings.get("desc_act") is True,
    )


def _read_fp8(settings: Mapping[str, Any]) -> Quantization:
    _require(settings, "fp8", "fmt", "e4m3", "float8_e4m3fn")
    block = settings.get("weight_block_size")
    return Quantization("fp8", block=None if block is None else _block("fp8", block))


def _read_compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    name = "compressed-tensors"
    _require(
        settings, name, "format", "int-quantized", "float-quantized", "naive-quantized", "dense"
    )
    if settings.get("transform_config"):
        raise StartupError(f"{_SOURCE}: {name} with transform_config is not supported")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict):
        _require(sparsity, f"{name} sparsity_config", "format", "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise StartupError(f"{_SOURCE}: {name} is supported with one of config_groups")
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise StartupError(f"{_SOURCE}: config_groups of {name} has no weights")
    _require(weights, name, "num_bits", 8)
    _require(weights, name, "type", "int", "float")
    _require(weights, name, "symmetric", True)
    _require(weights, name, "strategy", "tensor", "channel", "group", "block")
    method = "fp8" if weights.get("type") == "float" else "int8"
    if weights.get("strategy") == "block":
        return Quantization(method, block=_block(name, weights.get("block_structure")))
    return Quantization(method)


_READERS: dict[Any, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
}


def _block(method: str, value: Any) -> tuple[int, int]:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 1 << 20 for size in value)
    ):
        return value[0], value[1]
    raise StartupError(f"{_SOURCE}: {method} with blocks of {value!r} is not supported")


class PackedMatrices:
    """The quantised matrices of a checkpoint, by their names without ".weight"."""

    def __init__(
        self,
        quantization: Quantization,
        tensors: Mapping[str, TensorInfo],
        data: Callable[[str], npt.NDArray[np.uint8]],
    ) -> None:
        self._quantization = quantization
        self._tensors = tensors
        self._data = data
        stored = {"int8": ("I8", ".weight"), "fp8": ("F8_E4M3", ".weight")}
        dtype, suffix = stored.get(quantization.method, ("I32", ".qweight"))
        self._names = {
            name.removesuffix(suffix)
            for name, tensor in tensors.items()
            if tensor.dtype == dtype and name.endswith(suffix)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def owns(self, tensor: str) -> bool:
        """Whether the tensor is part of a quantised matrix."""
        name, dot, suffix = tensor.rpartition(".")
        return name in self._names and dot + suffix in _SUFFIXES

    def tensors_of(self, name: str) -> list[str]:
        """The tensors that a matrix may consist of."""
        return [name + suffix for suffix in _SUFFIXES]

    def is_unused_bias(self, tensor: str) -> bool:
        """Whether it is a bias of zeros, which some tools add to every matrix."""
        name, _, suffix = tensor.rpartition(".")
        return name in self._names and suffix == "bias" and not self._data(tensor).any()

    def ggml_types(self) -> Iterator[tuple[GGMLType, int, int]]:
        """Type after repack.as_ggml, rows and columns. Q4_1 stands for Q4_0 too."""
        for name in sorted(self._names):
            num_rows, num_cols = self._shape(name)
            yield self._ggml_type(name, num_cols), num_rows, num_cols

    def read(self, name: str, num_rows: int, num_cols: int) -> PackedWeight:
        """Raises StartupError for a tensor that is missing or has another shape or type."""
        found = self._shape(name)
        if found != (num_rows, num_cols):
            raise StartupError(
                f"tensor {name} has shape {found}; the model needs {(num_rows, num_cols)}"
            )
        if self._quantization.method in ("awq", "gptq"):
            return self._read_int4(name, num_rows, num_cols)
        if self._quantization.method == "int8":
            scales = self._scales(name, num_rows)
            if num_cols % scales.shape[1]:
                raise StartupError(f"tensor {name}.weight_scale does not divide {num_cols} columns")
            return Int8Weight(
                self._tensor(name + ".weight", (num_rows, num_cols), "I8"),
                scales.expand(num_rows, -1).contiguous(),
            )
        data = self._tensor(name + ".weight", (num_rows, num_cols), "F8_E4M3")
        block = self._quantization.block
        if block is None:
            return FP8Weight(data, self._scales(name, num_rows, most_groups=1))
        shape = (-(-num_rows // block[0]), -(-num_cols // block[1]))
        suffix = "_inv" if f"{name}.weight_scale_inv" in self._tensors else ""
        scales = self._tensor(f"{name}.weight_scale{suffix}", shape, *_FLOATS)
        return FP8Weight(data, scales.float(), block)

    def _read_int4(self, name: str, num_rows: int, num_cols: int) -> PackedWeight:
        num_groups = self._num_groups(name)
        words = num_rows // _CODES_IN_WORD
        zeros = self._tensor(name + ".qzeros", (num_groups, words), "I32")
        scales = self._tensor(name + ".scales", (num_groups, num_rows), *_FLOATS)
        if num_groups == 0 or num_cols % num_groups or num_rows % _CODES_IN_WORD:
            raise StartupError(f"{name} has {num_groups} groups, which do not divide its columns")
        if self._quantization.method == "awq":
            return AWQWeight(
                self._tensor(name + ".qweight", (num_cols, words), "I32"), zeros, scales
            )
        qweight = self._tensor(name + ".qweight", (num_cols // _CODES_IN_WORD, num_rows), "I32")
        g_idx = None
        if name + ".g_idx" in self._tensors:
            g_idx = self._tensor(name + ".g_idx", (num_cols,), "I32")
        weight = GPTQWeight(qweight, zeros, scales, g_idx, self._quantization.zero_offset)
        self._check_order(name, weight)
        return weight

    def _check_order(self, name: str, weight: GPTQWeight) -> None:
        if weight.g_idx is None:
            return
        groups = weight.g_idx.long()
        if not self._quantization.has_act_order and bool((groups.diff() < 0).any()):
            raise StartupError(f"tensor {name}.g_idx is not in order, though desc_act is not set")
        size = weight.num_cols // len(weight.scales)
        if not torch.equal(groups.sort()[0], torch.arange(weight.num_cols) // size):
            raise StartupError(f"tensor {name}.g_idx does not make groups of {size} columns")

    def _scales(self, name: str, num_rows: int, most_groups: int | None = None) -> torch.Tensor:
        """float32 [1 or num_rows, num_groups]."""
        full = name + ".weight_scale"
        if full not in self._tensors:
            raise StartupError(f"tensor {full} is missing")
        shape = self._tensors[full].shape
        scales = self._tensor(full, shape, *_FLOATS).float()
        scales = scales.reshape(len(scales) if shape else 1, -1)
        if len(scales) not in (1, num_rows) or scales.shape[1] > (most_groups or 1 << 20):
            raise StartupError(f"tensor {full} has shape {shape}; the model has {num_rows} rows")
        return scales

    def _tensor(self, name: str, shape: tuple[int, ...], *dtypes: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise StartupError(f"tensor {name} is missing; the model needs it with shape {shape}")
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise StartupError(
                f"tensor {name} is {tensor.dtype} {tensor.shape}; the model needs "
                f"{' or '.join(dtypes)} {shape}"
            )
        # A copy, as files need not align numbers.
        raw = torch.from_numpy(self._data(name).copy())
        return raw.view(_TORCH_TYPES[tensor.dtype]).view(shape)

    def _shape(self, name: str) -> tuple[int, int]:
        """Rows and columns. Raises StartupError for a tensor that is no matrix."""
        method = self._quantization.method
        full = name + (".qweight" if method in ("awq", "gptq") else ".weight")
        shape = self._tensors[full].shape
        if len(shape) != 2:
            raise StartupError(f"tensor {full} has shape {shape}; it must be a matrix")
        if method == "awq":
            return shape[1] * _CODES_IN_WORD, shape[0]
        if method == "gptq":
            return shape[1], shape[0] * _CODES_IN_WORD
        return shape[0], shape[1]

    def _num_groups(self, name: str) -> int:
        scales = self._tensors.get(name + ".scales")
        return scales.shape[0] if scales is not None and scales.shape else 0

    def _ggml_type(self, name: str, num_cols: int) -> GGMLType:
        method = self._quantization.method
        if method == "fp8":
            return GGMLType.BF16
        if method == "int8":
            scales = self._tensors.get(name + ".weight_scale")
            shape = scales.shape if scales is not None else ()
            num_groups = shape[1] if len(shape) == 2 else 1
            kind = GGMLType.Q8_0
        else:
            num_groups = self._num_groups(name)
            kind = GGMLType.Q4_1
        is_blocks = num_groups > 0 and num_cols // num_groups % kind.block_len == 0
        return kind if is_blocks and not self._quantization.has_act_order else GGMLType.F16
