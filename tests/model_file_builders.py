"""Small model files: whole ones made with the formats' own libraries, and GGUF from raw parts."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

UINT8, UINT32, FLOAT32, STRING, ARRAY, UINT64 = 0, 4, 6, 8, 9, 10


def write_gguf(path: Path, *, alignment: int | None = None) -> dict[str, np.ndarray]:
    """Writes a file with a value of each type and returns its tensors' bytes by name."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60_000)
    writer.add_int16("t.i16", -30_000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_float32("t.f32", 0.1)
    writer.add_uint64("t.u64", 1 << 63)
    writer.add_int64("t.i64", -(1 << 62))
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.str", "grüße 🙂")
    writer.add_array("t.strings", ["a", "", "▁über", "\n\n"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -1.25])
    writer.add_array("t.bools", [True, False, True])
    tensors = {
        "f32": rng.standard_normal((3, 8)).astype(np.float32),
        "f16": rng.standard_normal((2, 3, 8)).astype(np.float16),
        "vector": rng.standard_normal(5).astype(np.float32),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    q8 = gguf.quants.quantize(
        rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("q8", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    tensors["q8"] = q8
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: tensor.reshape(-1).view(np.uint8) for name, tensor in tensors.items()}


def write_split_gguf(
    folder: Path, num_parts: int = 3, *, tensor_name: str = "t{}", num_tensors: int | None = None
) -> list[Path]:
    """Writes `m-00001-of-0000N.gguf` and so on, one tensor `t0`, `t1`, ... per part.

    `num_tensors` is what the parts announce.
    """
    paths = []
    for number in range(num_parts):
        path = folder / f"m-{number + 1:05d}-of-{num_parts:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", num_parts if num_tensors is None else num_tensors)
        writer.add_tensor(tensor_name.format(number), np.full(4, number, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, value_type: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + payload


def array(name: str, item_type: int, count: int, payload: bytes = b"") -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", item_type, count) + payload)


def tensor(name: str, dims: tuple[int, ...], ggml_type: int = 0, offset: int = 0) -> bytes:
    """`dims` in file order: the contiguous dimension first."""
    head = string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return head + struct.pack("<IQ", ggml_type, offset)


def raw_gguf(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    data: bytes = bytes(256),
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """The bytes of a file; the counts may lie."""
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header += b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def raw_safetensors(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a file; the header's length may lie."""
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data
