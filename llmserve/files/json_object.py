"""Reads JSON objects from files that are not trusted: bounded, finite, without doubt."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from llmserve.errors import StartupError
from llmserve.files.mapping import quoted, reason

_MAX_FILE_BYTES = 32 << 20
_MAX_DEPTH = 32


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises StartupError naming the file and what is wrong."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise StartupError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist") from None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {reason(error)}") from error
    try:
        return parse_json_object(raw)
    except ValueError as error:
        raise StartupError(f"{path} is not usable: {error}") from error


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parses one JSON object in UTF-8. Raises ValueError saying what is wrong.

    Refused beyond what JSON refuses: duplicate keys, NaN, infinite numbers, more than 32 levels.
    """
    try:
        value = json.loads(
            str(raw, "utf-8-sig"),
            object_pairs_hook=_object,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} in line {error.lineno})") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"it has the key {quoted(key)} twice in one object")
            seen.add(key)
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds the number {quoted(text)}, which is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}, which is not a JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
