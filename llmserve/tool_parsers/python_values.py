"""Python literals, where they end in arriving text and as JSON."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings

from llmserve.tool_parsers.json_scanner import is_json
from llmserve.tool_parsers.source import Malformed, Source, Steps

_PLAIN = re.compile(r"[^'\"()\[\]{},#]*")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_python_value(source: Source) -> Steps[str]:
    """Reads up to the comma or bracket that ends an argument; returns the text."""
    start = source.pos
    closers: list[str] = []
    while True:
        yield from source.take(_PLAIN)
        if source.pos == len(source.text):
            raise Malformed
        char = source.text[source.pos]
        if not closers and char in ",)":
            return source.text[start : source.pos]
        if char in "'\"":
            yield from _read_string(source, char)
            continue
        if char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif char != "," and (not closers or char != closers.pop()):
            raise Malformed
        source.pos += 1


def python_to_json(text: str) -> str | None:
    """JSON of a literal, None if it is none. JSON stays as it is: true, false and null count too.

    Tuples become lists, and the keys of dictionaries must be strings.
    """
    text = text.strip()
    if is_json(text):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes
            value = _literal(ast.parse(text, mode="eval").body)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _read_string(source: Source, quote: str) -> Steps[None]:
    yield from _need(source, 2)
    if source.text.startswith(quote * 2, source.pos):
        has_more = yield from source.has(3)
        if not (has_more and source.text[source.pos + 2] == quote):
            source.pos += 2  # the empty string
            return
        quote *= 3
    source.pos += len(quote)
    while True:
        yield from source.until("\\", quote)
        if source.text.startswith(quote, source.pos):
            source.pos += len(quote)
            return
        yield from _need(source, 2)
        source.pos += 2


def _need(source: Source, size: int) -> Steps[None]:
    if not (yield from source.has(size)):
        raise Malformed


def _literal(node: ast.expr) -> object:
    """Raises ValueError."""
    match node:
        case ast.Constant(value=str() as text):
            # Pairs of surrogates, which JSON would have in its escapes, are one character.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=bool() | int() | None as value):
            return value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    key = _literal(node) if node is not None else None
    if not isinstance(key, str):
        raise ValueError("a key is not a string")
    return key
