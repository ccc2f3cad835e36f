"""Bounds for numbers of JSON schemas that have none: a model may write digits until max_tokens."""

from __future__ import annotations

from typing import Any

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator"),
    }
)
_MAX_INTEGER = 10**18 - 1
_MAX_NUMBER = 10**15
_SMALLEST = 1e-9
# Between bounds that are closer to each other there may be no multiple of the smallest number.
_MIN_RANGE = 1e-6

_LOW_KEYS = ("minimum", "exclusiveMinimum")
_HIGH_KEYS = ("maximum", "exclusiveMaximum")
_SHARED = {"integer": "llmserve-integer", "number": "llmserve-number"}
# multipleOf within a range would have too large an automaton.
_FIXED_KEYS = frozenset({"enum", "const", "multipleOf"})

# Any value, in the words of a schema: {} would be any value with numbers of any length.
_VALUE = {"$ref": "#/$defs/value"}
ANY_OBJECT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": _VALUE,
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["null", "boolean", "string"]},
                {"type": "number"},
                {"type": "array", "items": _VALUE},
                {"type": "object", "additionalProperties": _VALUE},
            ]
        }
    },
}


def bound_numbers(parts: list[dict[str, Any]], root: dict[str, Any]) -> None:
    """Changes the schemas, each of which holds alone for its value. `root` is the whole.

    Integers get at most 18 digits; other numbers 15 before the point, 9 behind it, and no
    exponent. Multiples, and bounds of the schema's own that reach further, stay as they are. Plain
    numbers share definitions, as a range costs llguidance a millisecond, but for oneOf: it does not
    look behind references for whether the options differ.
    """
    definitions = root.setdefault("$defs", {})
    may_share = isinstance(definitions, dict) and not any("oneOf" in part for part in parts)
    for part in parts:
        kind = part.get("type")
        name = _SHARED.get(kind) if isinstance(kind, str) and may_share else None
        if name is not None and not part.keys() - ANNOTATIONS - {"type"}:
            del part["type"]
            part["$ref"] = f"#/$defs/{name}"
            definitions[name] = _bounded({"type": kind})
        else:
            _bound_one(part)
    if not definitions:
        del root["$defs"]


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    _bound_one(schema)
    return schema


def _bound_one(schema: dict[str, Any]) -> None:
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if _FIXED_KEYS & schema.keys():
        return
    if "number" in names:
        _bound(schema, _MAX_NUMBER)
        if _has_room(schema):
            schema["multipleOf"] = _SMALLEST
    elif "integer" in names:
        _bound(schema, _MAX_INTEGER)


def _bound(schema: dict[str, Any], limit: int) -> None:
    lows, highs = _values(schema, _LOW_KEYS), _values(schema, _HIGH_KEYS)
    if not lows and all(high > -limit for high in highs):
        schema["minimum"] = -limit
    if not highs and all(low < limit for low in lows):
        schema["maximum"] = limit


def _has_room(schema: dict[str, Any]) -> bool:
    lows, highs = _values(schema, _LOW_KEYS), _values(schema, _HIGH_KEYS)
    return bool(lows and highs) and min(highs) - max(lows) > _MIN_RANGE


def _values(schema: dict[str, Any], keys: tuple[str, ...]) -> list[float]:
    found = [schema.get(key) for key in keys]
    return [v for v in found if isinstance(v, int | float) and not isinstance(v, bool)]
