"""Reads safetensors weights, one file or several shards, as views of mapped files.

After the format's specification (safetensors project): 8 bytes header length, a JSON header, then
the data, which the tensors must cover without gap and overlap. Nothing in the files is trusted;
every fault is a StartupError that names the file.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.errors import StartupError
from llmserve.files.json_object import parse_json_object, read_json_object
from llmserve.files.mapping import map_file, quoted

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 32 << 20  # a header has about 100 bytes per tensor
_MAX_DIMS = 16

_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `dtype` is the format's word, "F32" or "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of its file
    num_bytes: int
    shard: int = 0  # index of its file in SafetensorsFiles.paths


class SafetensorsFiles:
    """The weights of a folder: all tensors of all shards."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._mappings: list[mmap.mmap] = []
        self.tensors: dict[str, TensorInfo] = {}
        for index, path in enumerate(paths):
            mapping = map_file(path)
            self._mappings.append(mapping)
            for tensor in _read_header(path, mapping, index):
                if tensor.name in self.tensors:
                    other = paths[self.tensors[tensor.name].shard].name
                    raise StartupError(f"{path} repeats tensor {quoted(tensor.name)} of {other}")
                self.tensors[tensor.name] = tensor

    @classmethod
    def open(cls, folder: str | Path) -> SafetensorsFiles:
        """Opens model.safetensors, the shards of its index, or else every *.safetensors file.

        Raises StartupError if a file is missing or damaged, or if there is none.
        """
        folder = Path(folder)
        if (folder / _SINGLE_NAME).exists():
            return cls([folder / _SINGLE_NAME])
        if (folder / INDEX_NAME).exists():
            return cls._open_index(folder / INDEX_NAME)
        # Mistral ships its weights a second time as consolidated*.safetensors, with other names.
        paths = sorted(
            path for path in folder.glob("*.safetensors") if not path.match("consolidated*")
        )
        if not paths:
            raise StartupError(f"{folder} has no *.safetensors file")
        return cls(paths)

    @classmethod
    def _open_index(cls, index: Path) -> SafetensorsFiles:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{index} has no object weight_map with the shard of each tensor")
        shards: dict[str, Path] = {}
        for name in weight_map.values():
            if isinstance(name, str) and name in shards:
                continue
            if not isinstance(name, str) or not _is_file_name(name):
                raise StartupError(f"{index} names a shard outside its folder: {quoted(str(name))}")
            shards[name] = index.with_name(name)
            if not shards[name].exists():
                raise StartupError(
                    f"{index} names the shard {quoted(name)}, which is missing; "
                    "download the model again"
                )
        files = cls([shards[name] for name in sorted(shards)])
        for tensor, name in weight_map.items():
            info = files.tensors.get(tensor)
            if info is None or files.paths[info.shard].name != name:
                raise StartupError(
                    f"{index} says that {quoted(name)} holds {quoted(tensor)}, which it does not"
                )
        return files

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the mapped file. KeyError if unknown."""
        tensor = self.tensors[name]
        if not tensor.num_bytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(
            self._mappings[tensor.shard], np.uint8, tensor.num_bytes, tensor.offset
        )


def _is_file_name(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & set("/\\\0")


def _read_header(path: Path, data: mmap.mmap, shard: int) -> list[TensorInfo]:
    size = len(data)
    num_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + num_bytes
    if size < _LENGTH_BYTES or start > size:
        raise StartupError(f"{path} is cut short or not a safetensors file: its header ends early")
    if num_bytes > _MAX_HEADER_BYTES:
        raise StartupError(
            f"{path} claims a header of {num_bytes} bytes; the limit is {_MAX_HEADER_BYTES}"
        )
    try:
        header = parse_json_object(data[_LENGTH_BYTES:start])
        _check_metadata(header.pop("__metadata__", {}))
        tensors = [_tensor(name, entry, start, shard) for name, entry in header.items()]
        _check_cover(tensors, start, size)
    except ValueError as error:
        raise StartupError(f"{path} has an unusable header: {error}") from error
    return tensors


def _check_metadata(metadata: Any) -> None:
    """The file's own remarks; unused, but a wrong form means a damaged or foreign file."""
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("__metadata__ is not an object of strings")


def _tensor(name: str, entry: Any, start: int, shard: int) -> TensorInfo:
    """Raises ValueError if the entry does not describe a tensor."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{quoted(name)} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ValueError(
            f"{quoted(name)} has dtype {quoted(str(dtype))}; "
            f"supported are {', '.join(_DTYPE_BYTES)}"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"{quoted(name)} has a shape that is not a short list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{quoted(name)} has data_offsets that are not two positions")
    begin, end = offsets
    num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != num_bytes:
        raise ValueError(
            f"{quoted(name)} is given bytes {begin} to {end}, but {dtype} {shape} "
            f"takes {num_bytes} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), start + begin, num_bytes, shard)


def _are_sizes(value: Any) -> bool:
    """Whether the value is a list of whole numbers that fit into 64 bits."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 64 for item in value
    )


def _check_cover(tensors: list[TensorInfo], start: int, size: int) -> None:
    """Raises ValueError unless the tensors cover the bytes from start to size exactly."""
    end = start
    for tensor in sorted(tensors, key=lambda entry: (entry.offset, entry.num_bytes)):
        if tensor.offset != end:
            problem = "overlaps the tensor" if tensor.offset < end else "leaves a gap to the one"
            raise ValueError(f"the data of {quoted(tensor.name)} {problem} before it")
        end += tensor.num_bytes
    if end != size:
        kind = "is cut short" if end > size else "has bytes that no tensor uses"
        raise ValueError(f"tensors end at byte {end}, the file at byte {size}: it {kind}")
