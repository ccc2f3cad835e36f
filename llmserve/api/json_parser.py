"""JSON of any size to Python values, without keeping other threads from running for long.

orjson holds the GIL while it parses: about 1 ns a byte of text, but 50 to 200 ns a value. So a body
with very many values goes through the standard library's parser in its Python form, ten times
slower, between whose steps other threads run. That one takes some hundred levels of nesting,
orjson 1024.
"""

from __future__ import annotations

import json
from json import decoder, scanner
from typing import Any, NoReturn

import orjson

from llmserve.errors import RequestError

# What a body may hold at most: values, and among them objects and lists. The latter make garbage
# collection slow, 45 ms for a million.
MAX_VALUES = 1_000_000
MAX_CONTAINERS = 50_000

# Up to here orjson takes less than about 15 ms.
_FAST_VALUES = 200_000
_FAST_CONTAINERS = 20_000

_PIECE_BYTES = 1 << 17


def parse_json(body: bytes) -> Any:
    """Raises RequestError for what is not JSON (NaN and invalid UTF-8 included) or too much."""
    if body.count(b",") > _FAST_CONTAINERS or _count_openings(body) > _FAST_CONTAINERS:
        outside = _outside_strings(body)
        num_values, num_containers = outside.count(b","), _count_openings(outside)
        if num_containers > MAX_CONTAINERS:
            raise RequestError(f"the request body has more than {MAX_CONTAINERS} objects and lists")
        if num_values > MAX_VALUES:
            raise RequestError(f"the request body has more than {MAX_VALUES} values", status=413)
        if num_values > _FAST_VALUES or num_containers > _FAST_CONTAINERS:
            return _parse_yielding(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _not_json(error) from None


def _count_openings(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _outside_strings(body: bytes) -> bytes:
    """The body without its strings, if it is JSON. In pieces, so that other threads run."""
    kept = []
    is_inside = False
    begin = 0
    while begin < len(body):
        end = min(begin + _PIECE_BYTES, len(body))
        # An escape must not be cut in two: a piece ends before a run of backslashes.
        while begin < end < len(body) and body[end - 1] == ord("\\"):
            end -= 1
        if end == begin:
            end = min(begin + _PIECE_BYTES, len(body))
        piece = body[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        kept += parts[is_inside::2]
        is_inside ^= len(parts) % 2 == 0
        begin = end
    return b"".join(kept)


def _parse_yielding(body: bytes) -> Any:
    try:
        return _YieldingDecoder().decode(body.decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None


class _YieldingDecoder(json.JSONDecoder):
    """The standard decoder as it runs without its C scanner, but for strings."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant)
        self.parse_object = decoder.JSONObject  # type: ignore[attr-defined]
        self.parse_array = decoder.JSONArray  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _refuse_constant(name: str) -> NoReturn:
    raise _not_json(f"{name} is no JSON value")


def _not_json(problem: object) -> RequestError:
    return RequestError(f"the request body is not valid JSON: {problem}")
