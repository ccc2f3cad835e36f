"""The safetensors reader: equal to the safetensors library on valid files, a refusal of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from llmserve.errors import StartupError
from llmserve.files.safetensors import SafetensorsFiles
from tests.model_file_builders import raw_safetensors

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.arange(3, dtype=np.float16),
    "ids": np.arange(5, dtype=np.int64),
    "mask": np.array([[True, False]]),
    "scalar": np.array(2.5, np.float64),
    "none": np.zeros((0, 4), np.float32),
}


def write_shards(folder: Path, shards: dict[str, dict[str, np.ndarray]]) -> Path:
    """Writes the shards and an index that names them; returns the index."""
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def two_shards(folder: Path) -> Path:
    return write_shards(
        folder,
        {
            "model-00001-of-00002.safetensors": {"x": np.ones(2, np.float32)},
            "model-00002-of-00002.safetensors": {"y": np.zeros(3, np.float32)},
        },
    )


def test_single_file_equals_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})

    files = SafetensorsFiles.open(tmp_path)

    reference = dict(safetensors.deserialize(path.read_bytes()))
    assert files.tensors.keys() == reference.keys()
    for name, entry in reference.items():
        ours = files.tensors[name]
        assert (ours.dtype, list(ours.shape)) == (entry["dtype"], entry["shape"])
        assert files.data(name).tobytes() == bytes(entry["data"])


def test_data_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")

    data = SafetensorsFiles.open(tmp_path).data("a.weight")

    assert data.dtype == np.uint8
    assert not data.flags.writeable
    assert not data.flags.owndata


def test_shards_of_the_index_open_as_one(tmp_path: Path) -> None:
    two_shards(tmp_path)

    files = SafetensorsFiles.open(tmp_path)

    assert files.data("x").view(np.float32).tolist() == [1, 1]
    assert files.data("y").view(np.float32).tolist() == [0, 0, 0]


def test_shards_without_an_index_open_and_mistrals_copy_is_left_out(tmp_path: Path) -> None:
    two_shards(tmp_path).unlink()
    save_file({"x": np.zeros(9)}, tmp_path / "consolidated.safetensors")

    files = SafetensorsFiles.open(tmp_path)

    assert files.tensors.keys() == {"x", "y"}


def test_linked_shards_open_as_in_the_hub_cache(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    two_shards(folder)
    for number, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        blob = shard.rename(blobs / str(number))
        shard.symlink_to(blob)

    assert SafetensorsFiles.open(folder).tensors.keys() == {"x", "y"}


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    index = two_shards(tmp_path)
    save_file({"x": np.ones(2), "y": np.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")

    with pytest.raises(StartupError, match="repeats tensor 'x' of model-00001-of-00002"):
        SafetensorsFiles.open(index.parent)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(
        StartupError, match=r"'model-00002-of-00002\.safetensors', which is missing"
    ):
        SafetensorsFiles.open(tmp_path)


def test_index_that_promises_a_tensor_the_shard_lacks_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"z": np.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")

    with pytest.raises(StartupError, match="holds 'y', which it does not"):
        SafetensorsFiles.open(tmp_path)


def test_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    index = two_shards(tmp_path)
    content = json.loads(index.read_text())
    content["weight_map"]["y"] = content["weight_map"]["x"]
    content["weight_map"]["x"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))

    with pytest.raises(StartupError, match="which it does not"):
        SafetensorsFiles.open(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", "..", "", "x.bin", 7, None, []],
)
def test_index_naming_a_file_outside_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    save_file({"x": np.ones(2)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))

    with pytest.raises(StartupError, match="names a shard outside its folder"):
        SafetensorsFiles.open(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[]", ""])
def test_index_without_a_weight_map_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)

    with pytest.raises(StartupError, match=r"model\.safetensors\.index\.json"):
        SafetensorsFiles.open(tmp_path)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no \*\.safetensors file"):
        SafetensorsFiles.open(tmp_path)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> str:
    fields = {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}
    return json.dumps({"t": fields})


PAIR = '{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":%s}'
DAMAGED = {
    "header ends early": raw_safetensors("{}", length=3),
    "its header ends early": b"\x02\0\0",
    "or not a safetensors file": raw_safetensors("{}", length=(1 << 64) - 1),
    "limit is 33554432": raw_safetensors("{}" + " " * (32 << 20)),
    "not JSON": raw_safetensors("{"),
    "not UTF-8": raw_safetensors(b'{"\xff": 1}'),
    "not a JSON object": raw_safetensors("[]"),
    "nested deeper than 32": raw_safetensors('{"t":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "deeper than 32 levels": raw_safetensors('{"t":' + "[" * 40 + "]" * 40 + "}"),
    "key 't' twice": raw_safetensors(entry()[:-1] + "," + entry()[1:], bytes(8)),
    "NaN": raw_safetensors('{"t": NaN}'),
    "'1e999', which is too large": raw_safetensors('{"t": 1e999}'),
    "not an object of strings": raw_safetensors('{"__metadata__": {"a": 1}}'),
    "needs exactly dtype": raw_safetensors('{"t": 1}'),
    "shape and data_offsets": raw_safetensors(entry(extra=1), bytes(8)),
    "dtype 'F33'; supported are BOOL": raw_safetensors(entry("F33"), bytes(8)),
    "dtype '32'": raw_safetensors(entry(32), bytes(8)),
    "shape that is not": raw_safetensors(entry(shape=[-2]), bytes(8)),
    "not a short list of sizes": raw_safetensors(entry(shape=[1] * 17), bytes(4)),
    "a shape that": raw_safetensors(entry(shape=[True, 2]), bytes(8)),
    "has a shape that": raw_safetensors(entry(shape="2"), bytes(8)),
    "short list": raw_safetensors(entry(shape=[1 << 64]), bytes(8)),
    "data_offsets that are not two": raw_safetensors(entry(offsets=[0, 4, 8]), bytes(8)),
    "are not two positions": raw_safetensors(entry(offsets=[0.0, 8]), bytes(8)),
    "given bytes 8 to 0": raw_safetensors(entry(offsets=[8, 0]), bytes(8)),
    "[3] takes 12 bytes": raw_safetensors(entry(shape=[3]), bytes(8)),
    "takes 73786976294838206464 bytes": raw_safetensors(entry(shape=[1 << 32, 1 << 32])),
    "'u' overlaps": raw_safetensors(
        PAIR % '{"dtype":"U8","shape":[4],"data_offsets":[3,7]}', bytes(7)
    ),
    "'u' leaves a gap": raw_safetensors(
        PAIR % '{"dtype":"U8","shape":[4],"data_offsets":[5,9]}', bytes(9)
    ),
    "cut short": raw_safetensors(entry(), bytes(7)),
    "bytes that no tensor uses": raw_safetensors(entry(), bytes(9)),
}


@pytest.mark.parametrize("problem", DAMAGED)
def test_damaged_file_is_refused_in_one_sentence(tmp_path: Path, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[problem])

    with pytest.raises(StartupError) as caught:
        SafetensorsFiles.open(tmp_path)

    message = str(caught.value)
    assert problem in message
    assert message.startswith(str(path))
    assert "\n" not in message
