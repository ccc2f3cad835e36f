"""Tokenizers in the folders that Hugging Face models come in.

tokenizer.json holds nearly everything, also what is added around a text: the add_bos_token of
tokenizer_config.json no longer counts, as in transformers 5. tokenizer_config.json and its older
companions name the special tokens and hold the chat template. Folders without tokenizer.json are
converted by transformers, which takes seconds to import and is therefore loaded only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from llmserve.errors import StartupError
from llmserve.files.json_object import read_json_object
from llmserve.tokenizer.hf import HFTokenizer

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json")
_MAX_TEMPLATE_BYTES = 1 << 20


def load_hf_folder(folder: Path, eos_token_ids: tuple[int, ...] = ()) -> HFTokenizer:
    """`eos_token_ids` of the model come on top of the tokenizer's. Raises StartupError."""
    config = _read_optional(folder / _CONFIG)
    special = _named_tokens(_read_optional(folder / "special_tokens_map.json"))
    special |= _named_tokens(config)
    if (folder / _TOKENIZER).is_file():
        backend = _load_backend(folder / _TOKENIZER)
    elif any((folder / name).is_file() for name in _SOURCES):
        backend, converted = _convert(folder)
        special = converted | special
    else:
        raise StartupError(
            f"{folder} has no tokenizer ({_TOKENIZER} or {_SOURCES[0]}); pass one with --tokenizer"
        )
    _add_tokens(backend, folder, config)
    return HFTokenizer(backend, special, eos_token_ids)


def read_folder_templates(folder: Path) -> dict[str, str]:
    """Chat templates by name, of chat_template.jinja, else of tokenizer_config.json, else of
    chat_template.json: files of their own are the newer form. Raises StartupError.
    """
    named = _named_templates(folder / _CONFIG)
    if not named:
        named = _named_templates(folder / "chat_template.json")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = _read_template(path)
    default = folder / "chat_template.jinja"
    if default.is_file():
        named["default"] = _read_template(default)
    return named


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise StartupError(f"{path} is larger than {_MAX_TEMPLATE_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error


def _named_templates(path: Path) -> dict[str, str]:
    value = _read_optional(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {name: source for name, source in value.items() if isinstance(source, str)}
    if not isinstance(value, list):
        raise StartupError(
            f"{path}: chat_template is {value!r}; it must be a template, an object of templates by "
            "name, or a list of objects with name and template"
        )
    return {
        entry["name"]: entry["template"]
        for entry in value
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """ "bos_token": "<s>" and its like; a token may also be an object with its "content"."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _load_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise StartupError(f"{path} is not usable: {error}") from error


def _convert(folder: Path) -> tuple[Backend, dict[str, str]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    except Exception as error:  # transformers raises whatever its converters raise
        cause = str(error).strip().split("\n")[0]
        raise StartupError(f"the tokenizer in {folder} is not usable: {cause}") from error
    if not isinstance(backend, Backend):
        raise StartupError(f"the tokenizer in {folder} has no form as {_TOKENIZER}")
    return backend, {n: t for n, t in special.items() if n.endswith("_token")}


def _add_tokens(backend: Backend, folder: Path, config: Mapping[str, Any]) -> None:
    """Tokens that are declared beside tokenizer.json but lack in it, in the order of their ids."""
    declared: dict[int, AddedToken] = {}
    for text, token_id in _read_optional(folder / "added_tokens.json").items():
        if isinstance(token_id, int):
            declared[token_id] = AddedToken(text, normalized=False)
    decoder = config.get("added_tokens_decoder")
    for key, value in (decoder if isinstance(decoder, dict) else {}).items():
        if key.isdecimal() and isinstance(value, dict) and isinstance(value.get("content"), str):
            declared[int(key)] = _added_token(value)
    vocab = backend.get_vocab(with_added_tokens=True)
    for token_id, token in sorted(declared.items()):
        if token.content in vocab:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise StartupError(
                f"{folder} declares the token {token.content!r} with the id {token_id}, "
                f"which does not follow the ids in {_TOKENIZER}"
            )


def _added_token(value: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{name: bool(value.get(name, False)) for name in flags})
