"""Bounds for numbers of JSON schemas that have none: a model may write digits until max_tokens.

Values of which a schema says nothing may be numbers too.
"""

from __future__ import annotations

from typing import Any

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator"),
    }
)
_MAX_INTEGER = 10**18
_MAX_NUMBER = 10**15
_SMALLEST = 1e-9
# Between bounds that are closer to each other there may be no multiple of the smallest number.
_MIN_RANGE = 1e-6

_LOW_KEYS = ("minimum", "exclusiveMinimum")
_HIGH_KEYS = ("maximum", "exclusiveMaximum")
_SHARED = {"integer": "llmserve-integer", "number": "llmserve-number"}
# multipleOf within a range would have too large an automaton.
_FIXED_KEYS = frozenset({"enum", "const", "multipleOf"})

_ANY = "llmserve-value"

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

    Integers lie within 10^18 of zero, which llguidance's bounds cannot tell from 10^18 - 1; other
    numbers within 10^15, with 9 digits behind the point and no exponent. Multiples, and bounds of
    the schema's own that reach further, stay as they are. Plain numbers share definitions, as a
    range costs llguidance a millisecond, but for oneOf: it does not look behind references for
    whether the options differ. For that reason too, values of any kind keep their numbers as they
    are beside a oneOf.
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
    if may_share:
        _describe_any_values(parts, root, definitions)
    if not definitions:
        del root["$defs"]


def _describe_any_values(
    parts: list[dict[str, Any]], root: dict[str, Any], definitions: dict[str, Any]
) -> None:
    """Replaces {} and true, said or meant, by a reference to the same with bounded numbers."""
    reference = {"$ref": f"#/$defs/{_ANY}"}
    is_used = False
    for part in parts:
        for holder, key in _open_places(part):
            holder[key] = dict(reference)
            is_used = True
    if _is_any(root):
        root |= reference
        is_used = True
    if is_used:
        definitions[_SHARED["number"]] = _bounded({"type": "number"})
        definitions[_ANY] = {
            "anyOf": [
                {"type": ["null", "boolean", "string"]},
                {"$ref": f"#/$defs/{_SHARED['number']}"},
                {"type": "array", "items": reference},
                {"type": "object", "additionalProperties": reference},
            ]
        }


def _open_places(schema: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Containers and keys in them where the schema takes any value."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    places: list[tuple[Any, Any]] = []
    for name, key in (("array", "items"), ("object", "additionalProperties")):
        if name in names and _is_any(schema.get(key, True)):
            places.append((schema, key))
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        members = schema.get(key)
        if isinstance(members, dict):
            places += [(members, name) for name, member in members.items() if _is_any(member)]
    for key in ("anyOf", "prefixItems"):
        members = schema.get(key)
        if isinstance(members, list):
            places += [(members, place) for place, item in enumerate(members) if _is_any(item)]
    return places


def _is_any(schema: object) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS)


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
