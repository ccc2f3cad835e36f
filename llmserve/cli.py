"""Command line: flags, environment and YAML file -> ServerConfig -> server.

Flags are made from the fields of the configuration dataclasses, one help group per dataclass.
A setting's value is the first of: its flag, its variable (LLMSERVE_MAX_NUM_SEQS for
--max-num-seqs), its key in the --config file (max-num-seqs), its default. Anything wrong ends in
one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import Field, fields
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, NoReturn

from llmserve import __version__
from llmserve.config import ServerConfig
from llmserve.errors import StartupError
from llmserve.listener import bind
from llmserve.process_memory import begin_loading, keep_modules
from llmserve.torch_import import import_torch

if TYPE_CHECKING:
    from llmserve.loading import LoadedModel

_ENV_PREFIX = "LLMSERVE_"
# Read before or below the command line (env.py), or by the build (setup.py).
_OTHER_VARIABLES = {
    "LLMSERVE_CACHE_DIR",
    "LLMSERVE_CUDA_ARCHS",
    "LLMSERVE_NO_EXT",
    "LLMSERVE_REQUIRE_EXT",
    "LLMSERVE_SANITIZE",
}
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE_FIELDS = ("kv_cache_memory_bytes", "max_request_bytes", "response_store_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is told to stop; returns the process's exit code."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv, os.environ)
        for variable in unknown_variables(os.environ):
            print(f"llmserve: the environment variable {variable} has no effect", file=sys.stderr)
        return _serve(config)
    except StartupError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(config: ServerConfig) -> int:
    """Imports late: torch takes a second, which --help and a bad flag need not wait for. And the
    server's modules while the model is loaded, which is mostly work of compiled code."""
    listener = bind(config.frontend)
    begin_loading()
    import_torch()
    from llmserve.loading import load_model

    keep_modules()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(_import_server)
        model = load_model(config)
    return server.result()(model, listener)


def _import_server() -> Callable[[LoadedModel, socket], int]:
    from llmserve.server import run

    return run


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """Raises StartupError for anything that is not a valid setting."""
    settings = vars(_make_parser().parse_args(argv))
    path = settings.pop("config", None)
    from_file = _read_config_file(path) if path else {}
    from_env = _read_environment(environ)
    values = {**from_file, **from_env, **settings}
    parts = {}
    for group in fields(ServerConfig):
        group_class = _group_class(group)
        names = [field.name for field in fields(group_class)]
        try:
            parts[group.name] = group_class(**{n: values[n] for n in names if n in values})
        except ValueError as error:
            raise StartupError(str(error)) from error
    return ServerConfig(**parts)


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as a StartupError instead of printing the usage of 30 flags."""

    def error(self, message: str) -> NoReturn:
        known = [flag for action in self._actions for flag in action.option_strings]
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        close = difflib.get_close_matches(unknown.partition("=")[0], known, 1) if unknown else []
        if close:
            message += f" (did you mean {close[0]}?)"
        raise StartupError(f"{message}; see python -m llmserve --help")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m llmserve",
        description="Serves a language model over an OpenAI-compatible HTTP API.",
        epilog=f"Each flag has an environment variable, {_ENV_PREFIX}MAX_NUM_SEQS for "
        "--max-num-seqs, and a key of the same name in the --config file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--config", metavar="FILE.yaml", help="file with settings, by flag name")
    for group in fields(ServerConfig):
        group_class = _group_class(group)
        section = parser.add_argument_group(group_class.__name__, group_class.__doc__)
        for setting in fields(group_class):
            _add_flag(section, setting)
    return parser


def _add_flag(section: argparse._ArgumentGroup, setting: Field[Any]) -> None:
    name = "--" + setting.name.replace("_", "-")
    text = setting.metadata["help"]
    if setting.default not in (None, (), "") and not isinstance(setting.default, bool):
        text += f" (default: {setting.default})"
    help_text = text.replace("%", "%%")
    if _is_switch(setting):
        if setting.default is not None:
            help_text += f" (default: {'on' if setting.default else 'off'})"
        section.add_argument(name, action=argparse.BooleanOptionalAction, help=help_text)
        return
    metavar = setting.metadata["metavar"] or _type_name(setting)
    is_list = setting.type == "tuple[str, ...]"
    section.add_argument(
        name,
        type=str if is_list else _converter(setting),
        nargs="+" if is_list and metavar != "JSON" else None,
        choices=setting.metadata["choices"],
        metavar=None if setting.metadata["choices"] else metavar,
        action=_ListAction if is_list else "store",
        help=help_text,
    )


class _ListAction(argparse.Action):
    """A list given as several values, several flags, or one JSON list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        new = _to_list(values, option_string or self.dest)
        setattr(namespace, self.dest, getattr(namespace, self.dest, ()) + new)


def _group_class(group: Field[Any]) -> type[Any]:
    return typing.cast("type[Any]", typing.get_type_hints(ServerConfig)[group.name])


def _is_switch(setting: Field[Any]) -> bool:
    return str(setting.type).partition(" | ")[0] == "bool"


def _type_name(setting: Field[Any]) -> str:
    if setting.name in _SIZE_FIELDS:
        return "BYTES"
    base = str(setting.type).partition(" | ")[0]
    return {"int": "N", "float": "X"}.get(base, "VALUE")


def _converter(setting: Field[Any]) -> Any:
    """The function that reads the setting from a string; raises ValueError."""
    if setting.name in _SIZE_FIELDS:
        return _parse_size
    base = str(setting.type).partition(" | ")[0]
    return {"int": int, "float": float, "bool": _parse_bool}.get(base, str)


def _parse_size(text: str) -> int:
    """Raises ArgumentTypeError, which argparse shows as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 268435456, 256M or 2G")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def _parse_bool(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return values[text.strip().lower()]


def _to_list(value: Any, source: str) -> tuple[str, ...]:
    """A list from a list, a JSON list, or a single string."""
    items = value if isinstance(value, list) else [value]
    if len(items) == 1 and isinstance(items[0], str) and items[0].lstrip().startswith("["):
        try:
            items = json.loads(items[0])
        except json.JSONDecodeError:
            raise StartupError(f"{source} is {items[0]!r}; it must be a JSON list") from None
    if not all(isinstance(item, str) for item in items):
        raise StartupError(f"{source} is {value!r}; it must be a list of strings")
    return tuple(items)


def _all_settings() -> dict[str, Field[Any]]:
    return {
        setting.name: setting
        for group in fields(ServerConfig)
        for setting in fields(_group_class(group))
    }


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, setting in _all_settings().items():
        variable = _ENV_PREFIX + name.upper()
        if variable in environ:
            values[name] = _convert(setting, environ[variable], variable)
    return values


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that name no setting. No error: Kubernetes sets such ones in the
    pods beside a service called llmserve."""
    settings = {_ENV_PREFIX + name.upper() for name in _all_settings()}
    known = settings | _OTHER_VARIABLES
    return sorted(name for name in environ if name.startswith(_ENV_PREFIX) and name not in known)


def _read_config_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"--config {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise StartupError(f"--config {path} is not valid YAML: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"--config {path} must hold settings as 'flag-name: value' lines")
    settings = _all_settings()
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in settings:
            close = difflib.get_close_matches(name, settings, 1)
            hint = f" (did you mean {close[0].replace('_', '-')}?)" if close else ""
            raise StartupError(f"--config {path}: there is no setting {key!r}{hint}")
        if value is not None:
            values[name] = _convert(settings[name], value, f"--config {path}: {key}")
    return values


def _kind(setting: Field[Any]) -> str:
    return "true or false" if _is_switch(setting) else f"of type {setting.type}"


def _convert(setting: Field[Any], value: Any, source: str) -> Any:
    """Reads a setting from a string or a YAML value."""
    if setting.type == "tuple[str, ...]":
        return _to_list(value, source)
    if isinstance(value, dict) and setting.metadata["metavar"] == "JSON":
        return json.dumps(value)
    if isinstance(value, bool) != _is_switch(setting) and not isinstance(value, str):
        raise StartupError(f"{source} is {value!r}; it must be {_kind(setting)}")
    if isinstance(value, bool):
        return value
    try:
        return _converter(setting)(str(value))
    except (ValueError, KeyError, argparse.ArgumentTypeError):
        raise StartupError(f"{source} is {value!r}; it must be {_kind(setting)}") from None
