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
from llmserve.models.config import Fields

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
_STORED_TYPES = {"int8": "I8", "fp8": "F8_E4M3"}
# Tensors that no matrix of floats has beside it, so a matrix that lacks others of them is damaged.
_INT4_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_INT8_PARTS = (".weight_scale", ".weight_scale_inv")
# Tensors beside a quantised matrix that are read with it, or that tell nothing new of it.
_SUFFIXES = (
    *(".weight", ".input_scale"),
    *_INT4_PARTS,
    *_INT8_PARTS,
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantised matrices of a checkpoint are stored.

    `strategy`, which values share a scale of int8 or fp8: those of a tensor, channel (a row), group
    or block; None: a tensor or a channel, as the scales show.
    """

    method: str  # awq, gptq, int8 or fp8
    group_size: int | None = None  # columns; -1: all of a row; None: as the scales show
    strategy: str | None = None
    zero_offset: int = 0  # of GPTQ's zero points
    has_act_order: bool = False  # the columns of GPTQ's groups are not neighbours
    block: tuple[int, int] | None = None  # rows and columns
    block_scales: str = "weight_scale"  # their name


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """From config.json; None for a model whose matrices are not quantised.

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
    key = "q_group_size" if "q_group_size" in settings else "group_size"
    return Quantization("awq", _group_size(settings, key))


def _read_gptq(settings: Mapping[str, Any]) -> Quantization:
    _require(settings, "gptq", "bits", 4)
    _require(settings, "gptq", "checkpoint_format", "gptq", "gptq_v2")
    return Quantization(
        "gptq",
        # Rules of `dynamic` may give modules sizes of their own.
        None if settings.get("dynamic") else _group_size(settings, "group_size"),
        zero_offset=0 if settings.get("checkpoint_format") == "gptq_v2" else 1,
        has_act_order=Fields(settings, _SOURCE).flag("desc_act", False),
    )


def _read_fp8(settings: Mapping[str, Any]) -> Quantization:
    _require(settings, "fp8", "fmt", "e4m3", "float8_e4m3fn")
    block = settings.get("weight_block_size")
    if block is None:
        return Quantization("fp8")
    return Quantization(
        "fp8",
        strategy="block",
        block=_block("fp8", block),
        block_scales="weight_scale_inv",
    )


def _read_modelopt(settings: Mapping[str, Any]) -> Quantization | None:
    if settings.get("quant_algo") is None:
        return None  # it is the KV cache alone that is quantised
    _require(settings, "modelopt", "quant_algo", "FP8")
    return Quantization("fp8")


def _read_compressed_tensors(settings: Mapping[str, Any]) -> Quantization | None:
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
    if not groups and settings.get("kv_cache_scheme"):
        return None  # it is the KV cache alone that is quantised
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
    _require(weights, name, "actorder", False, "static", "weight")  # columns stay where they were
    method = "fp8" if weights.get("type") == "float" else "int8"
    strategy = weights.get("strategy")
    if strategy == "block":
        block = _block(name, weights.get("block_structure"))
        return Quantization(method, strategy=strategy, block=block)
    group_size = _group_size(weights, "group_size")
    if strategy == "group" and group_size is None:
        raise StartupError(f"{_SOURCE}: {name} with strategy 'group' has no group_size")
    return Quantization(method, group_size, strategy)


_READERS: dict[Any, Callable[[Mapping[str, Any]], Quantization | None]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
}


def _group_size(settings: Mapping[str, Any], key: str) -> int | None:
    fields = Fields(settings, _SOURCE)
    if not fields.has(key):
        return None
    value = fields.integer(key, minimum=-1)
    if value == 0:
        fields.reject(key, value, "above 0, or -1 for all columns of a row")
    return value


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
        dtype = _STORED_TYPES.get(quantization.method)
        parts = _INT4_PARTS if dtype is None else _INT8_PARTS
        self._names = set()
        for full, tensor in tensors.items():
            name, dot, suffix = full.rpartition(".")
            if dot + suffix in parts or (suffix == "weight" and tensor.dtype == dtype):
                self._names.add(name)

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
        """Type after repack.as_ggml, rows and columns. Q4_1 stands for Q4_0 too.

        Damaged matrices are left out: `read` says what they lack.
        """
        for name in sorted(self._names):
            shape = self._shape(name)
            if shape is not None:
                yield self._ggml_type(name, shape[1]), *shape

    def read(self, name: str, num_rows: int, num_cols: int) -> PackedWeight:
        """Raises StartupError for a tensor that is missing or has another shape or type."""
        method = self._quantization.method
        if method not in _STORED_TYPES:
            return self._read_int4(name, num_rows, num_cols)
        data = self._tensor(name + ".weight", (num_rows, num_cols), _STORED_TYPES[method])
        block = self._quantization.block
        if method == "int8":
            scales = self._scales(name, num_rows, num_cols)
            return Int8Weight(data, scales.expand(num_rows, -1).contiguous())
        if block is None:
            return FP8Weight(data, self._scales(name, num_rows, num_cols))
        shape = (-(-num_rows // block[0]), -(-num_cols // block[1]))
        full = f"{name}.{self._quantization.block_scales}"
        reason = f", as config.json has blocks of {block[0]} x {block[1]}"
        scales = self._tensor(full, shape, *_FLOATS, reason=reason)
        return FP8Weight(data, scales.float(), block)

    def _read_int4(self, name: str, num_rows: int, num_cols: int) -> PackedWeight:
        is_awq = self._quantization.method == "awq"
        packed = num_rows if is_awq else num_cols
        if packed % _CODES_IN_WORD or num_rows % _CODES_IN_WORD:
            raise StartupError(
                f"the model needs {name} with {num_rows} rows and {num_cols} columns, which words "
                f"of {_CODES_IN_WORD} codes do not divide"
            )
        words = num_rows // _CODES_IN_WORD
        shape = (num_cols, words) if is_awq else (num_cols // _CODES_IN_WORD, num_rows)
        qweight = self._tensor(name + ".qweight", shape, "I32")
        num_groups, reason = self._groups(name, num_cols)
        scales = self._tensor(name + ".scales", (num_groups, num_rows), *_FLOATS, reason=reason)
        zeros = self._tensor(name + ".qzeros", (num_groups, words), "I32", reason=reason)
        if is_awq:
            return AWQWeight(qweight, zeros, scales)
        g_idx = None
        if self._quantization.has_act_order:
            g_idx = self._tensor(
                name + ".g_idx", (num_cols,), "I32", reason=", as config.json has desc_act"
            )
        elif name + ".g_idx" in self._tensors:
            g_idx = self._tensor(name + ".g_idx", (num_cols,), "I32")
        weight = GPTQWeight(qweight, zeros, scales, g_idx, self._quantization.zero_offset)
        self._check_order(name, weight)
        return weight

    def _groups(self, name: str, num_cols: int) -> tuple[int, str]:
        """The number of groups of a row, and the reason for it to be put behind a shape."""
        size = self._quantization.group_size
        if size is None:
            num_groups = self._num_stored_groups(name) or 1
            if num_cols % num_groups:
                raise StartupError(
                    f"tensor {name}.scales has {num_groups} groups, which do not divide the "
                    f"model's {num_cols} columns"
                )
            return num_groups, ""
        if size == -1 or size >= num_cols:
            return 1, f", as config.json has group_size {size}"
        if num_cols % size:
            raise StartupError(
                f"{_SOURCE}: group_size is {size}, which does not divide the {num_cols} columns "
                f"of {name}"
            )
        return num_cols // size, f", as config.json has group_size {size}"

    def _check_order(self, name: str, weight: GPTQWeight) -> None:
        if weight.g_idx is None:
            return
        groups = weight.g_idx.long()
        if not self._quantization.has_act_order and bool((groups.diff() < 0).any()):
            raise StartupError(f"tensor {name}.g_idx is not in order, though desc_act is not set")
        size = weight.num_cols // len(weight.scales)
        if not torch.equal(groups.sort()[0], torch.arange(weight.num_cols) // size):
            raise StartupError(f"tensor {name}.g_idx does not make groups of {size} columns")

    def _scales(self, name: str, num_rows: int, num_cols: int) -> torch.Tensor:
        """float32 [1 or num_rows, num_groups]."""
        full = name + ".weight_scale"
        shapes, reason = self._scale_shapes(name, num_rows, num_cols)
        stored = self._tensors[full].shape if full in self._tensors else ()
        shape = stored if stored in shapes else shapes[0]
        scales = self._tensor(full, shape, *_FLOATS, reason=reason).float()
        return scales.reshape(len(scales) if shape else 1, -1)

    def _scale_shapes(
        self, name: str, num_rows: int, num_cols: int
    ) -> tuple[list[tuple[int, ...]], str]:
        """Shapes that the scales may have, and the reason for them."""
        strategy = self._quantization.strategy
        of_tensor: list[tuple[int, ...]] = [(1,), (), (1, 1)]
        of_rows: list[tuple[int, ...]] = [(num_rows, 1), (num_rows,)]
        if strategy == "tensor":
            return of_tensor, ", as config.json has strategy tensor"
        if strategy == "channel":
            return of_rows, ", as config.json has strategy channel"
        if strategy is None and self._quantization.group_size is None:
            return of_tensor + of_rows, ""
        num_groups, reason = self._groups(name, num_cols)
        return [(num_rows, num_groups)], reason

    def _tensor(
        self, name: str, shape: tuple[int, ...], *dtypes: str, reason: str = ""
    ) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise StartupError(
                f"tensor {name} is missing; the model needs it with shape {shape}{reason}"
            )
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise StartupError(
                f"tensor {name} is {tensor.dtype} {tensor.shape}; the model needs "
                f"{' or '.join(dtypes)} {shape}{reason}"
            )
        # A copy, as files need not align numbers.
        raw = torch.from_numpy(self._data(name).copy())
        return raw.view(_TORCH_TYPES[tensor.dtype]).view(shape)

    def _shape(self, name: str) -> tuple[int, int] | None:
        """Rows and columns, as the stored codes have them; None if they are no matrix."""
        method = self._quantization.method
        tensor = self._tensors.get(name + (".weight" if method in _STORED_TYPES else ".qweight"))
        if tensor is None or len(tensor.shape) != 2:
            return None
        shape = tensor.shape
        if method == "awq":
            return shape[1] * _CODES_IN_WORD, shape[0]
        if method == "gptq":
            return shape[1], shape[0] * _CODES_IN_WORD
        return shape[0], shape[1]

    def _num_stored_groups(self, name: str) -> int:
        """Of 4-bit codes; 0 if they have no scales."""
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
            num_groups = self._num_stored_groups(name)
            kind = GGMLType.Q4_1
        is_blocks = num_groups > 0 and num_cols // num_groups % kind.block_len == 0
        return kind if is_blocks and not self._quantization.has_act_order else GGMLType.F16
