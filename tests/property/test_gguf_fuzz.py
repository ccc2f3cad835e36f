"""Damaged GGUF and safetensors files, at random and at every byte: refused, or read correctly.

Nothing but StartupError may come out, and memory stays in proportion to the file.
"""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from llmserve.errors import StartupError
from llmserve.files.gguf import GGUFFile
from llmserve.files.json_object import parse_json_object
from llmserve.files.safetensors import SafetensorsFiles
from tests.model_file_builders import write_gguf

OpenedT = TypeVar("OpenedT")

# Reading a byte of a file may cost so much memory; beyond it a fixed amount for messages.
MAX_BYTES_PER_BYTE = 100
MAX_FIXED_BYTES = 300_000

FUZZ = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def gguf_bytes(folder: Path) -> bytes:
    path = folder / "valid.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def safetensors_bytes(folder: Path) -> bytes:
    path = folder / "valid"
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bb": np.arange(4, dtype=np.float16),
        "c": np.arange(3, dtype=np.uint8),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path.read_bytes()


def within_memory(size: int, action: Callable[[], Any]) -> Any:
    """Runs the action and checks how much memory it took at most."""
    tracemalloc.start()
    try:
        result = action()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_FIXED_BYTES + MAX_BYTES_PER_BYTE * size
    return result


def opened(open_file: Callable[[], OpenedT], path: Path) -> OpenedT | None:
    """What the reader returns, or None if it refused in one line that names the file."""
    try:
        return open_file()
    except StartupError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return None


def open_gguf(folder: Path, content: bytes) -> GGUFFile | None:
    """The opened file, or None if it was refused properly."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    file = opened(lambda: GGUFFile.open(path), path)
    if file is None:
        return None
    for name, tensor in file.tensors.items():
        assert len(file.data(name)) == tensor.num_bytes
        assert tensor.offset + tensor.num_bytes <= len(content)
    return file


def open_safetensors(
    folder: Path, content: bytes
) -> dict[str, tuple[str, list[int], bytes]] | None:
    """The tensors of the file, or None if it was refused properly."""
    path = folder / "model.safetensors"
    path.write_bytes(content)
    files = opened(lambda: SafetensorsFiles.open(folder), path)
    if files is None:
        return None
    return {
        name: (info.dtype, list(info.shape), files.data(name).tobytes())
        for name, info in files.tensors.items()
    }


def library_tensors(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (e["dtype"], list(e["shape"]), bytes(e["data"])) for name, e in entries}


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """The content with a few random edits: bytes changed, numbers planted, runs moved or cut."""
    result = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(result) - 1)))
        kind = data.draw(st.sampled_from(["byte", "number", "cut", "insert", "repeat"]))
        if kind == "byte":
            result[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
        elif kind == "number":
            width = data.draw(st.sampled_from([4, 8]))
            top = 1 << (8 * width)
            near = st.sampled_from([0, 1, 2, 3, 8, 9, 255, 1 << 31, top >> 1, top - 1, top - 32])
            number = data.draw(near | st.integers(0, top - 1) | st.integers(0, 100))
            result[at : at + width] = number.to_bytes(width, "little")
        elif kind == "cut":
            del result[at : at + data.draw(st.integers(1, 64))]
        elif kind == "insert":
            result[at:at] = data.draw(st.binary(min_size=1, max_size=16))
        else:
            result[at:at] = result[at : at + data.draw(st.integers(1, 64))]
    return bytes(result)


@FUZZ
@given(data=st.data())
def test_damaged_gguf_is_refused_or_read_within_its_bounds(
    folder: Path, gguf_bytes: bytes, data: st.DataObject
) -> None:
    content = damaged(gguf_bytes, data)

    within_memory(len(content), lambda: open_gguf(folder, content))


@FUZZ
@given(content=st.binary(max_size=200))
def test_random_bytes_after_a_gguf_start_are_refused_or_read(folder: Path, content: bytes) -> None:
    whole = b"GGUF\x03\0\0\0" + content

    within_memory(len(whole), lambda: open_gguf(folder, whole))


def test_gguf_cut_anywhere_before_its_last_tensor_byte_is_refused(
    folder: Path, gguf_bytes: bytes
) -> None:
    file = open_gguf(folder, gguf_bytes)
    assert file is not None
    end = max(tensor.offset + tensor.num_bytes for tensor in file.tensors.values())

    assert open_gguf(folder, gguf_bytes[:end]) is not None
    for size in range(end):
        assert open_gguf(folder, gguf_bytes[:size]) is None, size


@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0xFF])
def test_gguf_with_any_byte_replaced_is_refused_or_read(
    folder: Path, gguf_bytes: bytes, value: int
) -> None:
    for at in range(len(gguf_bytes)):
        open_gguf(folder, gguf_bytes[:at] + bytes([value]) + gguf_bytes[at + 1 :])


@FUZZ
@given(data=st.data())
def test_damaged_safetensors_is_refused_or_read_as_the_library_reads_it(
    folder: Path, safetensors_bytes: bytes, data: st.DataObject
) -> None:
    content = damaged(safetensors_bytes, data)

    ours = within_memory(len(content), lambda: open_safetensors(folder, content))

    if ours is not None:
        assert ours == library_tensors(content)


def test_safetensors_cut_anywhere_is_refused(folder: Path, safetensors_bytes: bytes) -> None:
    assert open_safetensors(folder, safetensors_bytes) == library_tensors(safetensors_bytes)
    for size in range(len(safetensors_bytes)):
        assert open_safetensors(folder, safetensors_bytes[:size]) is None, size


def test_safetensors_with_any_byte_replaced_reads_as_the_library_reads_it(
    folder: Path, safetensors_bytes: bytes
) -> None:
    for at in range(len(safetensors_bytes)):
        for value in (0x00, ord("0"), ord("9"), ord('"'), 0xFF):
            content = safetensors_bytes[:at] + bytes([value]) + safetensors_bytes[at + 1 :]
            ours = open_safetensors(folder, content)
            assert ours is None or ours == library_tensors(content), (at, value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(value=st.dictionaries(st.text(), json_values, max_size=3))
def test_json_objects_read_as_the_standard_library_reads_them(value: dict[str, Any]) -> None:
    raw = json.dumps(value)

    assert parse_json_object(raw.encode()) == json.loads(raw)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_json_number_that_is_not_finite_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="which is"):
        parse_json_object(f'{{"a": [1, {number}]}}'.encode())


@FUZZ
@given(
    raw=st.binary(max_size=50)
    | st.text(alphabet='{}[]":,0-9.eE\\nul ', max_size=50).map(str.encode)
)
def test_text_is_refused_or_read_as_the_standard_library_reads_it(raw: bytes) -> None:
    try:
        value = parse_json_object(raw)
    except ValueError:
        return

    assert value == json.loads(raw)
