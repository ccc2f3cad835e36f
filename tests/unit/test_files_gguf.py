"""The GGUF reader: equal to the gguf package on valid files, a clear refusal of others."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmserve.core.ggml import GGMLType
from llmserve.errors import StartupError
from llmserve.files.demo import demo_model_path
from llmserve.files.gguf import GGUFFile
from llmserve.files.string_array import StringArray
from tests.model_file_builders import (
    ARRAY,
    FLOAT32,
    STRING,
    UINT32,
    UINT64,
    array,
    key,
    raw_gguf,
    string,
    tensor,
    write_gguf,
    write_split_gguf,
)


def as_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, StringArray) else value


def open_bytes(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_equal_those_of_the_gguf_package(
    tmp_path: Path, alignment: int | None
) -> None:
    path = tmp_path / "model.gguf"
    expected_bytes = write_gguf(path, alignment=alignment)

    file = GGUFFile.open(path)
    reader = gguf.GGUFReader(path)

    assert {name: as_list(value) for name, value in file.metadata.items()} == {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert list(file.tensors) == [entry.name for entry in reader.tensors]
    for entry in reader.tensors:
        ours = file.tensors[entry.name]
        assert ours.ggml_type == entry.tensor_type
        assert list(ours.shape) == entry.shape.tolist()[::-1]
        assert (ours.offset, ours.num_bytes) == (entry.data_offset, entry.n_bytes)
        assert np.array_equal(file.data(entry.name), expected_bytes[entry.name])


def test_tensor_data_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)

    data = GGUFFile.open(path).data("q8")

    assert data.dtype == np.uint8
    assert not data.flags.writeable
    assert not data.flags.owndata


def test_arrays_keep_the_types_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)

    metadata = GGUFFile.open(path).metadata

    assert metadata["t.ints"].dtype == np.int32
    assert metadata["t.floats"].dtype == np.float32
    assert metadata["t.bools"].dtype == np.bool_
    assert metadata["t.bool"] is True


def test_version_2_is_read(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, raw_gguf((key("a", STRING, string("b")),), version=2))

    assert file.metadata == {"a": "b"}


@pytest.mark.parametrize("item_type", [FLOAT32, STRING])
def test_empty_array_at_the_end_of_the_file_is_read(tmp_path: Path, item_type: int) -> None:
    content = raw_gguf((array("a", item_type, 0),), data=b"", alignment=1)

    file = open_bytes(tmp_path, content)

    assert list(file.metadata["a"]) == []


def test_strings_of_all_lengths_are_read(tmp_path: Path) -> None:
    texts = ["", "é" * 64, "a", "x" * 127, "日" * 1000, ""]

    file = open_bytes(tmp_path, raw_gguf((array("a", STRING, 6, b"".join(map(string, texts))),)))

    assert list(file.metadata["a"]) == texts


def test_demo_model_equals_what_the_gguf_package_reads() -> None:
    path = demo_model_path(print)

    start = time.process_time()
    file = GGUFFile.open(path)
    seconds = time.process_time() - start
    reader = gguf.GGUFReader(path)

    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value = file.metadata[name]
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            assert len(value) == len(field.data)
            sample = range(0, len(value), max(1, len(value) // 500))
            assert [as_list(value[i]) for i in sample] == [field.contents(i) for i in sample]
        else:
            assert value == field.contents()
    assert [
        (entry.name, int(entry.tensor_type), entry.data_offset, entry.n_bytes)
        for entry in reader.tensors
    ] == [(t.name, int(t.ggml_type), t.offset, t.num_bytes) for t in file.tensors.values()]
    assert seconds < 1.0


ROW = tensor("t", (8,))
DAMAGED = {
    "begin with the letters GGUF": raw_gguf(magic=b"GGML"),
    "version 1; supported are 2 and 3": raw_gguf(version=1),
    "version 4;": raw_gguf(version=4),
    "version 0;": raw_gguf(version=0),
    "big-endian": raw_gguf(version=3 << 24),
    "claims 18446744073709551615 tensors": raw_gguf(num_tensors=(1 << 64) - 1),
    "claims 18446744073709551615 metadata keys": raw_gguf(num_keys=(1 << 64) - 1),
    "in the middle of its header": raw_gguf((key("a", UINT32, b""),), data=b"", alignment=1),
    "a metadata key ends past the end": raw_gguf((struct.pack("<Q", 1 << 62),)),
    "a metadata key of 70000 bytes": raw_gguf((string("k" * 70_000),)),
    "a metadata key is not UTF-8": raw_gguf((key(b"\xff", STRING, string("")),)),
    "value of 'a' ends past the end": raw_gguf((key("a", STRING, struct.pack("<Q", 1 << 40)),)),
    "value of 'a' is not UTF-8": raw_gguf((key("a", STRING, string(b"\xc3")),)),
    "metadata key 'a' twice": raw_gguf((key("a", STRING, string("")),) * 2),
    "unknown type 13 for 'a'": raw_gguf((key("a", 13, bytes(8)),)),
    "array of unknown type 99": raw_gguf((array("a", 99, 1),)),
    "array of arrays": raw_gguf((array("a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 50),)),
    "array 'a' ends past": raw_gguf((array("a", UINT64, 1 << 61),)),
    "array 'b' ends past": raw_gguf((array("b", UINT32, 300),)),
    "9223372036854775808 strings for 'a'": raw_gguf((array("a", STRING, 1 << 63),)),
    "string of 'a' ends past": raw_gguf((array("a", STRING, 1, struct.pack("<Q", 1 << 63)),)),
    "string 1 of 'a' is not UTF-8": raw_gguf(
        (array("a", STRING, 2, string("x") + string(b"\x80")),)
    ),
    # The length of the next string would complete the character.
    "string 0 of 'a' is not UTF-8": raw_gguf(
        (array("a", STRING, 2, string(b"x\xc3") + string("y" * 0xA0)),)
    ),
    "not a power of two": raw_gguf((key("general.alignment", UINT32, struct.pack("<I", 0)),)),
    "alignment that is not a power": raw_gguf(
        (key("general.alignment", UINT32, struct.pack("<I", 48)),)
    ),
    "general.alignment that": raw_gguf((key("general.alignment", STRING, string("32")),)),
    "tensor 't' twice": raw_gguf(tensors=(ROW, ROW)),
    "overlapping tensors 't' and 'u'": raw_gguf(tensors=(ROW, tensor("u", (8,)))),
    "has 0 dimensions": raw_gguf(tensors=(tensor("t", ()),)),
    "has 5 dimensions": raw_gguf(tensors=(tensor("t", (1,) * 5),)),
    "the shape [0] for 't'": raw_gguf(tensors=(tensor("t", (0,)),)),
    "the shape [4, 0] for 't'": raw_gguf(tensors=(tensor("t", (0, 4)),)),
    "the shape [18446744073709551615]": raw_gguf(tensors=(tensor("t", ((1 << 64) - 1,)),)),
    # 2^32 * 2^32 elements are 0 modulo 2^64.
    "the shape [4294967296, 4294967296]": raw_gguf(tensors=(tensor("t", (1 << 32, 1 << 32)),)),
    "do not divide into Q8_0 blocks": raw_gguf(tensors=(tensor("t", (48, 2), 8),)),
    "as IQ4_XS; supported are F32": raw_gguf(tensors=(tensor("t", (256,), 23),)),
    "as unknown type 4000": raw_gguf(tensors=(tensor("t", (256,), 4000),)),
    "not a multiple of its alignment 32": raw_gguf(tensors=(tensor("t", (8,), 0, 16),)),
    "cut short: tensor 't' ends": raw_gguf(tensors=(tensor("t", (8,), 0, 256),)),
    "ends at byte 18446744073709551": raw_gguf(tensors=(tensor("t", (8,), 0, (1 << 64) - 32),)),
}


@pytest.mark.parametrize("problem", DAMAGED)
def test_damaged_file_is_refused_in_one_sentence(tmp_path: Path, problem: str) -> None:
    with pytest.raises(StartupError) as caught:
        open_bytes(tmp_path, DAMAGED[problem])

    message = str(caught.value)
    assert problem in message
    assert message.startswith(str(tmp_path / "model.gguf"))
    assert "\n" not in message


def test_name_with_control_characters_is_escaped_in_the_message(tmp_path: Path) -> None:
    content = raw_gguf((key("\x1b[2J\n" + "x" * 1000, 99, b""),))

    with pytest.raises(StartupError, match=r"'\\x1b\[2J\\nx+\.\.\.'") as caught:
        open_bytes(tmp_path, content)

    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    empty, pipe = tmp_path / "empty.gguf", tmp_path / "pipe.gguf"
    empty.touch()
    os.mkfifo(pipe)

    for path, problem in (
        (empty, "is empty"),
        (pipe, "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "none.gguf", "cannot be opened: No such file"),
        (tmp_path / "a\0b", "cannot be opened"),
    ):
        with pytest.raises(StartupError, match=problem):
            GGUFFile.open(path)


def test_split_model_opens_with_all_its_parts(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 3)

    file = GGUFFile.open(paths[0])

    assert file.paths == paths
    for number in range(3):
        data = file.data(f"t{number}").view(np.float32)
        assert data.tolist() == [number] * 4


def test_later_part_of_a_split_model_names_the_first(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 3)

    with pytest.raises(StartupError, match=r"pass --model m-00001-of-00003\.gguf"):
        GGUFFile.open(paths[1])


def test_split_model_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 3)
    paths[2].unlink()

    with pytest.raises(StartupError, match=r"m-00003-of-00003\.gguf cannot be opened"):
        GGUFFile.open(paths[0])


def test_split_model_with_exchanged_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 3)
    paths[2].write_bytes(paths[1].read_bytes())

    with pytest.raises(StartupError, match="is not part 3 of 3"):
        GGUFFile.open(paths[0])


def test_later_part_in_the_place_of_the_first_is_refused(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 2)
    first = paths[0].read_bytes()
    paths[0].write_bytes(paths[1].read_bytes())
    paths[1].write_bytes(first)

    for path in paths:
        with pytest.raises(StartupError, match="is a later part of a split model"):
            GGUFFile.open(path)


def test_split_model_with_fewer_tensors_than_announced_is_refused(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 2, num_tensors=3)

    with pytest.raises(StartupError, match="announces 3 tensors in 2 parts, but they hold 2"):
        GGUFFile.open(paths[0])


def test_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 2, tensor_name="same")

    with pytest.raises(StartupError, match=r"m-00002-of-00002\.gguf repeats tensor 'same'"):
        GGUFFile.open(paths[0])


def test_renamed_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    renamed = write_split_gguf(tmp_path, 2)[0].rename(tmp_path / "model.gguf")

    with pytest.raises(StartupError, match=r"does not end in -00001-of-00002\.gguf"):
        GGUFFile.open(renamed)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(key("split.count", STRING, string("2")), id="string"),
        pytest.param(array("split.count", UINT32, 0), id="array"),
    ],
)
def test_split_count_of_another_type_is_refused(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(StartupError, match=r"split\.count that is not a whole number"):
        open_bytes(tmp_path, raw_gguf((value,)))


@pytest.mark.parametrize("ggml_type", list(GGMLType))
def test_block_sizes_equal_those_of_the_gguf_package(ggml_type: GGMLType) -> None:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]

    assert (ggml_type.block_len, ggml_type.block_bytes) == (block_len, block_bytes)
    assert ggml_type.name == gguf.GGMLQuantizationType(ggml_type).name


def test_strings_of_an_array_are_indexed_and_cut_like_a_list(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    strings = GGUFFile.open(path).metadata["t.strings"]
    expected = ["a", "", "▁über", "\n\n"]

    assert [strings[i] for i in range(-4, 4)] == expected * 2
    assert strings[1:3] == expected[1:3]
    assert strings.index("▁über") == 2
    with pytest.raises(IndexError):
        strings[4]
