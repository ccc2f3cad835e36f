"""From `--model` to opened files: which format, where, and the JSON files beside the weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmserve.config import ModelConfig
from llmserve.errors import StartupError
from llmserve.files.demo import DEMO_NAME, demo_model_path
from llmserve.files.gguf import GGUFFile, is_later_part
from llmserve.files.hub import download, parse_hub_id
from llmserve.files.json_object import read_json_object
from llmserve.files.mapping import quoted, reason
from llmserve.files.safetensors import SafetensorsFiles

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_MODELOPT_CONFIG = "hf_quant_config.json"  # of versions that leave config.json as it was
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model: weights mapped, JSON parsed, nothing interpreted.

    A "gguf" model has `gguf` and an empty `config`. A "huggingface" model has `config`, and
    `safetensors` unless --load-format is dummy.
    """

    kind: Literal["huggingface", "gguf"]
    name: str  # the model's name in the API unless --served-model-name says otherwise
    path: Path  # folder or GGUF file
    tokenizer_path: Path  # where the model's own tokenizer is: folder or GGUF file
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    gguf: GGUFFile | None = None
    safetensors: SafetensorsFiles | None = None


def open_model(config: ModelConfig, report: Callable[[str], None]) -> ModelFiles:
    """Finds the model, downloading or assembling it if need be, and opens its files.

    `report` gets a line for each thing that may take a while. Raises StartupError if there is no
    such model, or if a file of it is missing or damaged.
    """
    path = _locate(config, report)
    if os.path.isdir(path):
        path = _choose(path, config)
    name = DEMO_NAME if config.model is None else config.model
    if os.path.isdir(path):
        return ModelFiles(
            kind="huggingface",
            name=name,
            path=path,
            tokenizer_path=path,
            config=_read_config(path, config),
            generation_config=_read_generation_config(path, config),
            safetensors=None if config.load_format == "dummy" else SafetensorsFiles.open(path),
        )
    return ModelFiles(
        kind="gguf",
        name=name,
        path=path,
        tokenizer_path=path,
        generation_config=_read_generation_config(None, config),
        gguf=_open_gguf(path, config),
    )


def _locate(config: ModelConfig, report: Callable[[str], None]) -> Path:
    """The folder or file that --model means, on this machine."""
    if config.model is None:
        if config.load_format in ("safetensors", "dummy"):
            raise StartupError(
                f"--load-format {config.load_format} needs --model; the demo model is a GGUF file"
            )
        return demo_model_path(report)
    path = Path(config.model).expanduser()
    if config.model and os.path.exists(path):
        return path
    hub_model = parse_hub_id(config.model)
    if hub_model is None:
        raise StartupError(f"--model {quoted(config.model)} does not exist")
    if config.load_format == "gguf" and hub_model.gguf_file is None:
        raise StartupError(
            f"--load-format gguf needs the name of a file: pass --model {config.model}:FILE.gguf"
        )
    with_weights = config.load_format != "dummy"
    return download(
        hub_model, config.revision, config.download_dir, report, with_weights=with_weights
    )


def _choose(folder: Path, config: ModelConfig) -> Path:
    """The folder itself if its safetensors (or config.json alone) serve, else its GGUF file."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StartupError(f"--model {config.model} cannot be read: {reason(error)}") from error
    if config.load_format == "dummy":
        return folder
    if config.load_format != "gguf" and any(
        name.endswith((".safetensors", ".safetensors.index.json")) for name in names
    ):
        return folder
    candidates = [
        name
        for name in names
        if name.endswith(".gguf")
        and not name.startswith("mmproj")  # the image encoder of a model, not a model
        and not is_later_part(Path(name))
    ]
    if not candidates or config.load_format == "safetensors":
        raise StartupError(_no_weights(folder, names, config))
    if len(candidates) > 1:
        shown = ", ".join(candidates[:5]) + (", ..." if len(candidates) > 5 else "")
        raise StartupError(
            f"--model {config.model} has {len(candidates)} GGUF files ({shown}); "
            "pass the path of one of them"
        )
    return folder / candidates[0]


def _no_weights(folder: Path, names: list[str], config: ModelConfig) -> str:
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"--model {config.model} has weights only as PyTorch pickles ({pickles[0]}), which may "
            "run code when loaded; convert them to safetensors"
        )
    if config.load_format != "auto":
        return (
            f"--model {config.model} has no *.{config.load_format} files, "
            f"which --load-format {config.load_format} asks for"
        )
    if Path(str(config.model)).expanduser() != folder:
        return (
            f"--model {config.model} has no *.safetensors files on the hub; "
            f"for a GGUF file pass {config.model}:FILE.gguf"
        )
    return f"--model {config.model} has no weights: neither *.safetensors nor *.gguf files"


def _open_gguf(path: Path, config: ModelConfig) -> GGUFFile:
    if path.suffix == ".safetensors":
        raise StartupError(f"--model {config.model} is one file of a model; pass its folder")
    if config.load_format in ("safetensors", "dummy"):
        raise StartupError(
            f"--load-format {config.load_format} needs a folder with {_CONFIG}; "
            f"--model {config.model} is a file"
        )
    return GGUFFile.open(path)


def _read_config(folder: Path, config: ModelConfig) -> dict[str, Any]:
    if not (folder / _CONFIG).exists():
        raise StartupError(
            f"--model {config.model} has no {_CONFIG}, which says how the model is built"
        )
    values = read_json_object(folder / _CONFIG)
    if values.get("quantization_config") is None and (folder / _MODELOPT_CONFIG).exists():
        settings = read_json_object(folder / _MODELOPT_CONFIG).get("quantization")
        if isinstance(settings, dict):
            values["quantization_config"] = {"quant_method": "modelopt"} | settings
    return values


def _read_generation_config(folder: Path | None, config: ModelConfig) -> dict[str, Any]:
    """`folder` is the model's; None for GGUF models, which keep no such file."""
    choice = config.generation_config
    if choice == "vllm":
        return {}
    if choice == "auto":
        if folder is None or not (folder / _GENERATION_CONFIG).exists():
            return {}
        return read_json_object(folder / _GENERATION_CONFIG)
    path = Path(choice).expanduser() / _GENERATION_CONFIG
    if not os.path.exists(path):
        raise StartupError(
            f"--generation-config {choice} is neither auto, nor vllm, nor a folder "
            f"with a {_GENERATION_CONFIG}"
        )
    return read_json_object(path)
