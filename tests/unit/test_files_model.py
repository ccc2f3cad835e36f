"""From --model to opened files: what is found, what is preferred, what is refused and how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmserve.config import ModelConfig
from llmserve.errors import StartupError
from llmserve.files.hub import HubModel, parse_hub_id
from llmserve.files.model import ModelFiles, open_model
from tests.model_file_builders import write_gguf, write_split_gguf


def opened(model: Path | str | None, **settings: Any) -> ModelFiles:
    return open_model(ModelConfig(model=None if model is None else str(model), **settings), print)


def write_model(folder: Path, **more: str) -> Path:
    """A folder with config.json and one tensor; `more` are further files by stem."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.ones(2, np.float32)}, folder / "model.safetensors")
    for stem, content in more.items():
        (folder / f"{stem}.json").write_text(content)
    return folder


def test_folder_with_safetensors_opens(tmp_path: Path) -> None:
    folder = write_model(tmp_path, generation_config='{"top_k": 7}')

    files = opened(folder)

    assert files.kind == "huggingface"
    assert files.name == str(folder)
    assert files.path == files.tokenizer_path == folder
    assert files.config == {"model_type": "llama"}
    assert files.generation_config == {"top_k": 7}
    assert files.gguf is None
    assert files.safetensors is not None
    assert files.safetensors.data("w").view(np.float32).tolist() == [1, 1]


def test_quantisation_of_modelopt_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    folder = write_model(tmp_path, hf_quant_config=json.dumps({"quantization": settings}))

    assert opened(folder).config["quantization_config"] == settings | {"quant_method": "modelopt"}
    write_model(tmp_path, config='{"quantization_config": {"quant_method": "fp8"}}')
    assert opened(folder).config["quantization_config"] == {"quant_method": "fp8"}
    write_model(tmp_path, hf_quant_config='{"quantization": 5}')
    assert "quantization_config" not in opened(folder).config


def test_gguf_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)

    files = opened(path)

    assert (files.kind, files.name, files.path) == ("gguf", str(path), path)
    assert files.tokenizer_path == path
    assert files.config == files.generation_config == {}
    assert files.safetensors is None
    assert files.gguf is not None
    assert files.gguf.metadata["general.architecture"] == "llama"


def test_folder_with_one_gguf_file_opens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    write_gguf(tmp_path / "mmproj-m.gguf")

    assert opened(tmp_path).path == tmp_path / "m.gguf"


def test_folder_with_one_split_gguf_model_opens(tmp_path: Path) -> None:
    paths = write_split_gguf(tmp_path, 3)

    files = opened(tmp_path)

    assert files.gguf is not None
    assert files.gguf.paths == paths


def test_folder_with_both_formats_opens_what_load_format_says(tmp_path: Path) -> None:
    write_gguf(write_model(tmp_path) / "m.gguf")

    assert opened(tmp_path).kind == "huggingface"
    assert opened(tmp_path, load_format="safetensors").kind == "huggingface"
    assert opened(tmp_path, load_format="gguf").kind == "gguf"


def test_dummy_weights_need_config_json_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    files = opened(tmp_path, load_format="dummy")

    assert files.kind == "huggingface"
    assert files.safetensors is None


def test_tilde_means_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "model")

    assert opened("~/model").path == tmp_path / "model"


def test_folder_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q4.gguf")
    write_gguf(tmp_path / "q8.gguf")

    with pytest.raises(StartupError, match=r"2 GGUF files \(q4\.gguf, q8\.gguf\); pass the path"):
        opened(tmp_path)


REFUSED_FOLDERS = {
    "has no weights": ({"config.json": "{}"}, "auto"),
    "pickles (pytorch_model.bin)": ({"config.json": "{}", "pytorch_model.bin": "x"}, "auto"),
    "convert them to safetensors": ({"model.pth": "x"}, "safetensors"),
    "has no *.safetensors files, which": ({"config.json": "{}", "m.gguf": "x"}, "safetensors"),
    "has no *.gguf files, which": ({"config.json": "{}", "a.safetensors": "x"}, "gguf"),
    "has no config.json": ({"a.safetensors": "x"}, "auto"),
    "--model {folder} has no config.json": ({}, "dummy"),
    "not JSON (Expecting value in line 1)": ({"config.json": "nonsense"}, "dummy"),
    "not a JSON object": ({"config.json": "[1, 2]"}, "dummy"),
    "holds NaN": ({"config.json": '{"a": NaN}'}, "dummy"),
    "holds Infinity": ({"config.json": '{"a": Infinity}'}, "dummy"),
    "nested deeper than 32 levels": (
        {"config.json": '{"a": ' * 99999 + "1" + "}" * 99999},
        "dummy",
    ),
    "key 'a' twice": ({"config.json": '{"a": 1, "a": 2}'}, "dummy"),
    "larger than 32 MiB": ({"config.json": " " * (32 << 20) + "{}"}, "dummy"),
    "generation_config.json is not usable": (
        {"config.json": "{}", "generation_config.json": "{"},
        "dummy",
    ),
}


@pytest.mark.parametrize("problem", REFUSED_FOLDERS)
def test_folder_is_refused_in_one_sentence(tmp_path: Path, problem: str) -> None:
    contents, load_format = REFUSED_FOLDERS[problem]
    for name, content in contents.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(StartupError) as caught:
        opened(tmp_path, load_format=load_format)

    assert problem.replace("{folder}", str(tmp_path)) in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_json_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()

    with pytest.raises(StartupError, match=r"config\.json cannot be read: Is a directory"):
        opened(tmp_path, load_format="dummy")


def test_single_safetensors_file_asks_for_its_folder(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="one file of a model; pass its folder"):
        opened(write_model(tmp_path) / "model.safetensors")


@pytest.mark.parametrize("load_format", ["dummy", "safetensors"])
def test_gguf_file_does_not_fit_another_load_format(tmp_path: Path, load_format: str) -> None:
    write_gguf(tmp_path / "m.gguf")

    with pytest.raises(StartupError, match=f"--load-format {load_format} needs a folder"):
        opened(tmp_path / "m.gguf", load_format=load_format)
    with pytest.raises(StartupError, match=f"--load-format {load_format} needs --model"):
        opened(None, load_format=load_format)


@pytest.mark.parametrize(
    "model", ["/nowhere/model", "./model", "../a/b", "a/b.gguf", "model.gguf", "a/b/c", "a\0b", ""]
)
def test_path_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        opened(model)


def test_generation_config_comes_from_the_folder_that_the_flag_names(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", generation_config='{"top_k": 7}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 9}')

    assert opened(model, generation_config="vllm").generation_config == {}
    assert opened(model, generation_config=str(other)).generation_config == {"top_k": 9}
    with pytest.raises(StartupError, match="--generation-config nowhere is neither auto"):
        opened(model, generation_config="nowhere")


def test_generation_config_folder_applies_to_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "generation_config.json").write_text('{"top_k": 9}')

    assert opened(tmp_path / "m.gguf").generation_config == {}
    assert opened(tmp_path / "m.gguf", generation_config=str(tmp_path)).generation_config == {
        "top_k": 9
    }


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt2", HubModel("gpt2")),
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("a/b:q4.gguf", HubModel("a/b", "q4.gguf")),
        ("a/b/q4.gguf", HubModel("a/b", "q4.gguf")),
        ("a/b/sub/q4.gguf", HubModel("a/b", "sub/q4.gguf")),
        ("a/b:sub/q4.gguf", HubModel("a/b", "sub/q4.gguf")),
        ("a/b:../../q4.gguf", None),
        ("a/b:/q4.gguf", None),
        ("a/b:Q4_K_M", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("b.gguf", None),
    ],
)
def test_hub_ids_are_told_from_paths(model: str, expected: HubModel | None) -> None:
    assert parse_hub_id(model) == expected


def test_opening_a_model_imports_neither_torch_nor_the_hub_client(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from llmserve.config import ModelConfig\n"
        "from llmserve.files.model import open_model\n"
        "open_model(ModelConfig(model=sys.argv[1]), print)\n"
        "print(*sorted({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)))\n"
    )
    folder = write_model(tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == ""


def test_model_of_a_json_config_survives_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": "é"}).encode())

    assert opened(tmp_path, load_format="dummy").config == {"a": "é"}
