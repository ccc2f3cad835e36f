"""Reads GGUF model files, versions 2 and 3, little-endian, in one part or several.

The file is mapped: metadata is parsed at once (0.07 s for a vocabulary of 262,144 strings), tensor
data are views of the mapping. After the GGUF specification (ggml project, docs/gguf.md). Nothing in
the file is trusted; every fault is a StartupError that names the file.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from llmserve.core.ggml import GGMLType
from llmserve.errors import StartupError
from llmserve.files.mapping import map_file, quoted
from llmserve.files.string_array import StringArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65_535  # the specification's limit for keys

# Far above real models; they bound the memory that a hostile file can claim.
_MAX_KEYS = 65_536
_MAX_TENSORS = 1 << 18
_MAX_STRINGS = 1 << 24
_MAX_PARTS = 1_000

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: dict[int, tuple[struct.Struct, str]] = {  # value type -> reader, numpy type
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (struct.Struct("<I"), "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    _BOOL: (struct.Struct("<?"), "<u1"),
    10: (struct.Struct("<Q"), "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in numpy order: rows first, the contiguous dimension last."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of its file
    num_bytes: int
    part: int = 0  # index of its file in GGUFFile.paths


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of a model."""

    path: Path
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class GGUFFile:
    """An opened model: metadata of the first part, tensors of all parts.

    Metadata values are int, float, bool, str, StringArray, or a read-only numpy array (a view of
    the file, possibly unaligned) for arrays of numbers and booleans.
    """

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self.paths = [part.path for part in parts]
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise StartupError(f"{part.path} repeats tensor {quoted(name)} of another part")
                self.tensors[name] = tensor

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Opens a file, and with the first part of a split model all others.

        Raises StartupError if a file is missing, damaged or of a kind that is not supported.
        """
        path = Path(path)
        first = _parse(path, 0)
        num_parts = _count(first, "split.count", 1)
        if num_parts in (0, 1):  # not split; some writers say 0
            return cls([first])
        paths = _part_paths(first, num_parts)
        parts = [first] + [_parse(other, index) for index, other in enumerate(paths) if index]
        for index, part in enumerate(parts[1:], 1):
            if (_count(part, "split.no", 0), _count(part, "split.count", 1)) != (index, num_parts):
                raise StartupError(
                    f"{part.path} is not part {index + 1} of {num_parts} of the model, "
                    "as its name and its neighbours say"
                )
        file = cls(parts)
        expected = _count(first, "split.tensors.count", len(file.tensors))
        if expected != len(file.tensors):
            raise StartupError(
                f"{path} announces {expected} tensors in {num_parts} parts, "
                f"but they hold {len(file.tensors)}"
            )
        return file

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the mapped file. KeyError if unknown."""
        tensor = self.tensors[name]
        mapping = self._parts[tensor.part].data
        return np.frombuffer(mapping, np.uint8, tensor.num_bytes, tensor.offset)


def is_later_part(path: Path) -> bool:
    """Whether the name is that of a split model's second or later file."""
    match = _PART_NAME.fullmatch(path.name)
    return match is not None and int(match["number"]) > 1


def _count(part: _Part, key: str, default: int) -> int:
    """A metadata value that must be a whole number."""
    value = part.metadata.get(key, default)
    if type(value) is not int:
        raise StartupError(f"{part.path} has a value of {key} that is not a whole number")
    return value


def _part_paths(first: _Part, num_parts: int) -> list[Path]:
    """The files of a split model, the first included; checks that `first` is the first."""
    path = first.path
    match = _PART_NAME.fullmatch(path.name)
    if not 1 < num_parts <= _MAX_PARTS:
        raise StartupError(f"{path} has split.count {num_parts}; 1 to {_MAX_PARTS} are allowed")
    if match is None or int(match["count"]) != num_parts:
        raise StartupError(
            f"{path} is one of {num_parts} parts, but its name does not end in "
            f"-00001-of-{num_parts:05d}.gguf; rename the parts as they were"
        )
    names = [f"{match['stem']}-{i + 1:05d}-of-{num_parts:05d}.gguf" for i in range(num_parts)]
    if int(match["number"]) != 1 or _count(first, "split.no", 0) != 0:
        raise StartupError(f"{path} is a later part of a split model; pass --model {names[0]}")
    return [path.with_name(name) for name in names]


def _parse(path: Path, part: int) -> _Part:
    return _Parser(path, part).parse()


class _Parser:
    """Reads the header of one file front to back; `_pos` is the next byte."""

    def __init__(self, path: Path, part: int) -> None:
        self._path = path
        self._part = part
        self._data = map_file(path)
        self._size = len(self._data)
        self._pos = 0

    def parse(self) -> _Part:
        try:
            num_tensors, num_keys = self._read_start()
            metadata = self._read_metadata(num_keys)
            tensors = self._read_tensors(num_tensors, self._alignment(metadata))
        except struct.error:  # the only way to read past the end
            self._fail("ends in the middle of its header; download it again")
        return _Part(self._path, self._data, metadata, tensors)

    def _fail(self, problem: str) -> NoReturn:
        raise StartupError(f"{self._path} {problem}")

    def _unpack(self, reader: struct.Struct) -> Any:
        (value,) = reader.unpack_from(self._data, self._pos)
        self._pos += reader.size
        return value

    def _read_start(self) -> tuple[int, int]:
        if self._data[:4] != _MAGIC:
            self._fail("is not a GGUF file: it does not begin with the letters GGUF")
        self._pos = 4
        version = self._unpack(_U32)
        if version and version & 0xFFFF == 0:
            self._fail("is a big-endian GGUF file, which is not supported")
        if version not in _VERSIONS:
            self._fail(f"has GGUF version {version}; supported are 2 and 3")
        num_tensors, num_keys = self._unpack(_U64), self._unpack(_U64)
        if num_tensors > _MAX_TENSORS:
            self._fail(f"claims {num_tensors} tensors; the limit is {_MAX_TENSORS}")
        if num_keys > _MAX_KEYS:
            self._fail(f"claims {num_keys} metadata keys; the limit is {_MAX_KEYS}")
        return num_tensors, num_keys

    def _read_string(self, what: str, max_bytes: int | None = None) -> str:
        num_bytes = self._unpack(_U64)
        if num_bytes > self._size - self._pos:
            self._fail(f"is damaged: {what} ends past the end of the file")
        if max_bytes is not None and num_bytes > max_bytes:
            self._fail(f"has {what} of {num_bytes} bytes; the limit is {max_bytes}")
        raw = self._data[self._pos : self._pos + num_bytes]
        self._pos += num_bytes
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            self._fail(f"is damaged: {what} is not UTF-8 text")

    def _read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_string("a metadata key", _MAX_NAME_BYTES)
            if key in metadata:
                self._fail(f"has the metadata key {quoted(key)} twice")
            metadata[key] = self._read_value(key, self._unpack(_U32))
        return metadata

    def _read_value(self, key: str, value_type: int) -> Any:
        if value_type == _STRING:
            return self._read_string(f"the value of {quoted(key)}")
        if value_type == _ARRAY:
            return self._read_array(key)
        if value_type not in _SCALARS:
            self._fail(f"has a value of unknown type {value_type} for {quoted(key)}")
        return self._unpack(_SCALARS[value_type][0])

    def _read_array(self, key: str) -> Any:
        value_type, count = self._unpack(_U32), self._unpack(_U64)
        if value_type == _ARRAY:
            self._fail(f"has an array of arrays for {quoted(key)}, which is not supported")
        if value_type == _STRING:
            return self._read_strings(key, count)
        if value_type not in _SCALARS:
            self._fail(f"has an array of unknown type {value_type} for {quoted(key)}")
        dtype = np.dtype(_SCALARS[value_type][1])
        if count > (self._size - self._pos) // dtype.itemsize:
            self._fail(f"is damaged: the array {quoted(key)} ends past the end of the file")
        # A mapping shorter than its offset cannot be viewed, not even for zero elements.
        array = np.frombuffer(self._data, dtype, count, self._pos) if count else np.empty(0, dtype)
        self._pos += count * dtype.itemsize
        return array != 0 if value_type == _BOOL else array

    def _read_strings(self, key: str, count: int) -> StringArray:
        # Vocabularies have 100,000s of entries: locals and one bound check per entry.
        data, size, pos, unpack = self._data, self._size, self._pos, _U64.unpack_from
        if count > min((size - pos) // 8, _MAX_STRINGS):
            self._fail(
                f"claims {count} strings for {quoted(key)}, more than the file holds (was it "
                f"cut short?) or than the limit of {_MAX_STRINGS}"
            )
        starts: list[int] = []
        append = starts.append
        for _ in range(count):
            pos += _U64.size
            append(pos)
            pos += unpack(data, pos - _U64.size)[0]
            if pos > size:
                self._fail(f"is damaged: a string of {quoted(key)} ends past the file's end")
        self._pos = pos
        append(pos + _U64.size)
        strings = StringArray(data, np.array(starts, np.int64), _U64.size)
        damaged = strings.first_damaged()
        if damaged is not None:
            self._fail(f"is damaged: string {damaged} of {quoted(key)} is not UTF-8 text")
        return strings

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail("has a general.alignment that is not a power of two")
        return alignment

    def _read_tensors(self, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for _ in range(num_tensors):
            tensor = self._read_tensor(alignment)
            if tensor.name in tensors:
                self._fail(f"has the tensor {quoted(tensor.name)} twice")
            tensors[tensor.name] = tensor
        start = -(-self._pos // alignment) * alignment
        placed = {
            name: GGUFTensor(
                name,
                entry.ggml_type,
                entry.shape,
                start + entry.offset,
                entry.num_bytes,
                self._part,
            )
            for name, entry in tensors.items()
        }
        self._check_extents(placed)
        return placed

    def _read_tensor(self, alignment: int) -> GGUFTensor:
        """One entry; its offset is still relative to the start of the data."""
        name = self._read_string("a tensor name", _MAX_NAME_BYTES)
        num_dims = self._unpack(_U32)
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(
                f"has {num_dims} dimensions for {quoted(name)}; 1 to {_MAX_DIMS} are allowed"
            )
        shape = tuple(self._unpack(_U64) for _ in range(num_dims))[::-1]
        ggml_type = self._tensor_type(name, self._unpack(_U32))
        offset = self._unpack(_U64)
        if offset % alignment:
            self._fail(
                f"has data of {quoted(name)} at offset {offset}, "
                f"which is not a multiple of its alignment {alignment}"
            )
        num_rows = 1
        for dim in shape[:-1]:
            num_rows *= dim
        try:
            num_bytes = num_rows * ggml_type.row_bytes(shape[-1])
        except ValueError as error:
            self._fail(f"has a wrong shape for {quoted(name)}: {error}")
        if not 0 < num_bytes <= self._size:
            self._fail(
                f"has the shape {list(shape)} for {quoted(name)}, which it cannot hold "
                "(was it cut short?)"
            )
        return GGUFTensor(name, ggml_type, shape, offset, num_bytes)

    def _tensor_type(self, name: str, number: int) -> GGMLType:
        try:
            return GGMLType(number)
        except ValueError:
            known = _UNSUPPORTED_TYPES.get(number)
            supported = ", ".join(item.name for item in GGMLType)
            self._fail(
                f"stores {quoted(name)} as {known or f'unknown type {number}'}; "
                f"supported are {supported}"
            )

    def _check_extents(self, tensors: dict[str, GGUFTensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda entry: entry.offset):
            if tensor.offset < end:
                self._fail(f"has overlapping tensors {quoted(previous)} and {quoted(tensor.name)}")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name
        if end > self._size:
            self._fail(
                f"is cut short: tensor {quoted(previous)} ends at byte {end} of {self._size}; "
                "download it again"
            )


# Types of the specification that the server does not compute with, for the error message.
_UNSUPPORTED_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
