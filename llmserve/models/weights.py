"""Weights by the decoder's parameter names, from a checkpoint or from a seed.

Matrices stay in the type in which the file stores them, in the mapped file or, after
`keep_in_memory`, in huge pages, packed if they are quantised; vectors become float32. A tensor that
is missing, has another shape or is not used is a StartupError that names it.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmserve.errors import StartupError
from llmserve.files.gguf import GGUFFile, GGUFTensor
from llmserve.files.mapping import drop_pages
from llmserve.files.safetensors import SafetensorsFiles, TensorInfo
from llmserve.kernels import GGMLType, KVScales, Weight, keep, kept_bytes
from llmserve.kernels.huge_pages import HugePages
from llmserve.kernels.packed_weight import PackedWeight
from llmserve.kernels.repack import as_ggml
from llmserve.models.config import DecoderConfig
from llmserve.models.kv_scales import StoredKVScales
from llmserve.models.names import NameMap, gguf_names, hf_names
from llmserve.models.quantization import PackedMatrices, Quantization

_SAFETENSORS_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
_TORCH_TYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DUMMY_STD = 0.02


class Weights(Protocol):
    """Where a decoder gets its parameters. `layer` is None for those outside layers."""

    @property
    def kv_dtype(self) -> str:
        """The cache type that fits the weights: float32, bfloat16, or float16 for all others."""
        ...

    @property
    def act_dtype(self) -> str:
        """The type of activations that fits the weights, where these are of 16 bits at most."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def keep_in_memory(self) -> None:
        """Matrices that are asked for from now on lie in huge pages, not in mapped files."""
        ...

    def leave_packed(self) -> None:
        """Matrices of other quantisation methods than GGUF's come as their files store them, and
        not as GGML types."""
        ...

    def has(self, parameter: str, layer: int | None = None) -> bool: ...

    def matrix(
        self, parameter: str, num_rows: int, num_cols: int, layer: int | None = None
    ) -> Weight | PackedWeight: ...

    def norm(self, parameter: str, size: int, layer: int | None = None) -> torch.Tensor:
        """float32 [size]."""
        ...

    def bias(self, parameter: str, size: int, layer: int | None = None) -> torch.Tensor:
        """float32 [size]."""
        ...

    def kv_scales(self, layer: int, num_kv_heads: int) -> KVScales | None:
        """For a KV cache of fp8; None where the checkpoint has none. In the CPU's memory."""
        ...

    def check_all_used(self) -> None:
        """Raises StartupError if the checkpoint holds what no parameter asked for."""
        ...


class CheckpointWeights:
    """Weights of an opened GGUF file or safetensors folder."""

    def __init__(
        self,
        tensors: Mapping[str, GGUFTensor] | Mapping[str, TensorInfo],
        data: Callable[[str], npt.NDArray[np.uint8]],
        names: NameMap,
        dtype: str = "auto",
        packed: PackedMatrices | None = None,
        kv_scales: StoredKVScales | None = None,
    ) -> None:
        """dtype: of matrices that are not quantised; "auto" keeps theirs."""
        self._tensors: Mapping[str, Any] = tensors
        self._data = data
        self._names = names
        self._dtype = _DTYPES.get(dtype)
        self._packed = packed
        self._kv_scales = kv_scales
        self._is_left_packed = False
        self._used: set[str] = set()
        self._memory: HugePages | None = None

    @classmethod
    def from_gguf(cls, file: GGUFFile, config: DecoderConfig, dtype: str) -> CheckpointWeights:
        return cls(file.tensors, file.data, gguf_names(config), dtype)

    @classmethod
    def from_safetensors(
        cls,
        files: SafetensorsFiles,
        config: DecoderConfig,
        dtype: str,
        quantization: Quantization | None = None,
        hf_config: Mapping[str, Any] | None = None,
    ) -> CheckpointWeights:
        """hf_config: config.json, for what it says of the KV cache."""
        packed = None
        if quantization is not None:
            packed = PackedMatrices(quantization, files.tensors, files.data)
        kv_scales = StoredKVScales(hf_config or {}, files.tensors, files.data)
        names = hf_names(config, files.tensors)
        return cls(files.tensors, files.data, names, dtype, packed, kv_scales)

    @property
    def kv_dtype(self) -> str:
        types = self._matrix_types()
        if self._packed is not None or any(kind.is_quantized for kind in types):
            return "float16"
        stored = {_TORCH_TYPES[kind] for kind in types}
        if self._dtype is not None:
            stored = {self._dtype}
        for name in ("float32", "bfloat16"):
            if stored == {_DTYPES[name]}:
                return name
        return "float16"

    @property
    def act_dtype(self) -> str:
        stored = self._matrix_types()
        if self._dtype is not None:
            return _name(self._dtype)
        floats = {_TORCH_TYPES[kind] for kind in stored if not kind.is_quantized}
        # bfloat16 has the range that activations of some quantised models need.
        is_one = len(floats) == 1 and floats == {_TORCH_TYPES.get(kind) for kind in stored}
        return _name(floats.pop()) if is_one else "bfloat16"

    def _matrix_types(self) -> set[GGMLType]:
        return {self._type(name) for name in self._matrix_names()}

    @property
    def num_bytes(self) -> int:
        num_bytes: int = sum(tensor.num_bytes for tensor in self._tensors.values())
        if self._packed is None or self._is_left_packed:
            return num_bytes
        for name, tensor in self._tensors.items():
            num_bytes -= tensor.num_bytes if self._packed.owns(name) else 0
        for kind, num_rows, num_cols in self._packed.ggml_types():
            num_bytes += num_rows * kind.row_bytes(num_cols)
        return num_bytes

    def _matrix_names(self) -> list[str]:
        """Of matrices that are stored as GGML types."""
        return [
            name
            for name in self._tensors
            if len(self._shape(name)) == 2
            and not (self._packed is not None and self._packed.owns(name))
            and not (self._kv_scales is not None and self._kv_scales.owns(name))
        ]

    def keep_in_memory(self) -> None:
        sizes = [kept_bytes(self._type(name), *self._shape(name)) for name in self._matrix_names()]
        if self._packed is not None:
            sizes += [kept_bytes(*matrix) for matrix in self._packed.ggml_types()]
        self._memory = HugePages(sum(map(HugePages.size_of, sizes)))

    def leave_packed(self) -> None:
        self._is_left_packed = True

    def has(self, parameter: str, layer: int | None = None) -> bool:
        name = self._names.name(parameter, layer)
        return name + ".weight" in self._tensors or (
            self._packed is not None and name in self._packed
        )

    def matrix(
        self, parameter: str, num_rows: int, num_cols: int, layer: int | None = None
    ) -> Weight | PackedWeight:
        module = self._names.name(parameter, layer)
        if self._packed is not None and module in self._packed:
            return self._packed_matrix(self._packed.read(module, num_rows, num_cols), module)
        name = self._take(parameter, layer, ".weight", (num_rows, num_cols))
        kind = self._type(name)
        try:
            raw = _tensor(self._data(name)).view(num_rows, kind.row_bytes(num_cols))
        except ValueError as error:
            raise StartupError(f"tensor {name}: {error}") from error
        if kind.is_quantized or self._dtype in (None, _TORCH_TYPES[kind]):
            return self._place(Weight(raw, kind, num_rows, num_cols))
        values = _floats(raw, kind).view(num_rows, num_cols)
        return Weight.from_tensor(values.to(self._dtype))

    def _packed_matrix(self, matrix: PackedWeight, module: str) -> Weight | PackedWeight:
        assert self._packed is not None
        self._used.update(self._packed.tensors_of(module))
        if self._is_left_packed:
            return matrix
        weight = as_ggml(matrix)
        return weight if self._memory is None else keep(weight, self._memory)

    def _place(self, weight: Weight) -> Weight:
        """The matrix, or a copy of it in huge pages, for which its pages of the file are let go."""
        if self._memory is None:
            return weight
        kept = keep(weight, self._memory)
        drop_pages(weight.data.data_ptr(), weight.data.numel())
        return kept

    def norm(self, parameter: str, size: int, layer: int | None = None) -> torch.Tensor:
        return self._vector(self._take(parameter, layer, ".weight", (size,)))

    def bias(self, parameter: str, size: int, layer: int | None = None) -> torch.Tensor:
        return self._vector(self._take(parameter, layer, ".bias", (size,)))

    def kv_scales(self, layer: int, num_kv_heads: int) -> KVScales | None:
        if self._kv_scales is None:
            return None
        return self._kv_scales.read(self._names.name("attention", layer), num_kv_heads)

    def check_all_used(self) -> None:
        extra = [
            name
            for name in self._tensors
            if name not in self._used
            and not self._names.is_ignored(name)
            and not (self._packed is not None and self._packed.is_unused_bias(name))
            and not (self._kv_scales is not None and self._kv_scales.owns(name))
        ]
        if extra:
            shape = tuple(self._shape(extra[0]))
            raise StartupError(
                f"the checkpoint holds {len(extra)} tensors that this architecture does not have, "
                f"such as {extra[0]} of shape {shape}"
            )

    def _take(self, parameter: str, layer: int | None, suffix: str, shape: tuple[int, ...]) -> str:
        name = self._names.name(parameter, layer) + suffix
        if name not in self._tensors:
            raise StartupError(f"tensor {name} is missing; the model needs it with shape {shape}")
        found = tuple(self._shape(name))
        if found != shape:
            raise StartupError(f"tensor {name} has shape {found}; the model needs {shape}")
        self._used.add(name)
        return name

    def _vector(self, name: str) -> torch.Tensor:
        kind = self._type(name)
        if kind.is_quantized:
            raise StartupError(f"tensor {name} is of type {kind.name}; a vector must be of floats")
        return _floats(_tensor(self._data(name)), kind).to(torch.float32)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._tensors[name].shape
        return shape

    def _type(self, name: str) -> GGMLType:
        tensor = self._tensors[name]
        if isinstance(tensor, GGUFTensor):
            return tensor.ggml_type
        if tensor.dtype not in _SAFETENSORS_TYPES:
            raise StartupError(
                f"tensor {name} is of type {tensor.dtype}; supported are "
                f"{', '.join(_SAFETENSORS_TYPES)}"
            )
        return _SAFETENSORS_TYPES[tensor.dtype]


class DummyWeights:
    """Random weights from a seed: each parameter's depend on the seed and its name alone.

    They are made where the model runs, which gives a GPU other values than the CPU.
    """

    def __init__(self, config: DecoderConfig, dtype: str, seed: int, device: str = "cpu") -> None:
        self._config = config
        self._dtype = _DTYPES[dtype]
        self.kv_dtype = dtype
        self.act_dtype = dtype
        self._seed = seed
        self._device = device
        self.num_bytes = 0

    def keep_in_memory(self) -> None:
        """They already are; test models do not need huge pages."""

    def leave_packed(self) -> None:
        """They are floats."""

    def has(self, parameter: str, layer: int | None = None) -> bool:
        return parameter not in ("qkv", "gate_up")

    def matrix(
        self, parameter: str, num_rows: int, num_cols: int, layer: int | None = None
    ) -> Weight:
        # The CPU draws in float32, whatever the type; a GPU would need the memory twice.
        dtype = torch.float32 if self._device == "cpu" else self._dtype
        values = self._normal(f"{parameter} {layer}", (num_rows, num_cols), dtype)
        weight = Weight.from_tensor(values.to(self._dtype))
        self.num_bytes += weight.data.numel()
        return weight

    def norm(self, parameter: str, size: int, layer: int | None = None) -> torch.Tensor:
        return torch.full((size,), 1.0 - self._config.norm_weight_offset)

    def bias(self, parameter: str, size: int, layer: int | None = None) -> torch.Tensor:
        return self._normal(f"{parameter} bias {layer}", (size,), torch.float32)

    def kv_scales(self, layer: int, num_kv_heads: int) -> KVScales | None:
        return None

    def check_all_used(self) -> None:
        """Nothing is stored, so nothing is left over."""

    def _normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed ^ zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=dtype, device=self._device)
        return values.normal_(0.0, _DUMMY_STD, generator=generator)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(view: npt.NDArray[np.uint8]) -> torch.Tensor:
    """uint8 [num_bytes] over the same memory."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; no kernel writes to a weight.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(view.reshape(-1))


def _floats(raw: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    """The values of stored floats, as a copy: files need not align them."""
    return raw.reshape(-1).clone().view(_TORCH_TYPES[kind])
