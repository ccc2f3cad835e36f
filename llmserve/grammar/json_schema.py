"""JSON schemas in the form that llguidance takes.

llguidance refuses keywords that it knows and does not enforce. Here is what it would read another
way than the schema's author: tuples and bounds in the style of old drafts, keywords that change
nothing, its own options, and objects whose undeclared properties nobody meant to allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llmserve.grammar.schema_bounds import check_intersections, check_root_reference
from llmserve.grammar.schema_numbers import ANNOTATIONS, bound_numbers
from llmserve.grammar.spec import GrammarError

# One of these, once, wherever JSON allows whitespace: a model that likes either is not driven off
# its habits, and none can go on with whitespace for ever.
DEFAULT_WHITESPACE = r"[ \n]"
# Below the depth at which llguidance's JSON reader gives up.
_MAX_DEPTH = 100
# The automaton of the multiples of n has n states.
_MAX_MULTIPLE = 20_000

_OF_WHITESPACE = re.compile(
    r"(?:\\[snrt]|\\x(?:20|09|0[aAdD])|[ \t\n\r]|[\[\]()?*+|]|\(\?:|\{\d*,?\d*\})*"
)

_SCHEMA_KEYS = frozenset(
    {
        *("additionalProperties", "items", "not", "if", "then", "else", "contains"),
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    }
)
_LIST_KEYS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAP_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COMBINING_KEYS = ("allOf", "anyOf", "oneOf", "$ref")
# A schema with the former and none of the latter is meant to be one of an object.
_OBJECT_KEYS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_OTHER_KEYS = frozenset(
    {
        *("type", "enum", "const", "$ref", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "minItems", "maxItems"),
    }
)
_CLOCK = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$"
# RFC 3339 also has leap seconds, small letters and endless fractions, which few readers take.
_PLAIN_FORMATS = {"time": f"^{_CLOCK}", "date-time": f"^[0-9-]+T{_CLOCK}"}
# Other formats are annotations, as JSON Schema has it.
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    }
)
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}


def guidance_schema(
    schema: object, whitespace: str | None, *, closes_objects: bool = False
) -> dict[str, Any]:
    """The schema with options for llguidance; the arguments are as in GrammarSpec.

    A schema that tells of properties and of no type is one of an object. An object that declares
    properties and says nothing about others holds no others, as if additionalProperties were false,
    and numbers are bounded: all that it allows, the schema allows too. But for the first, schemas
    that are combined with others are left as they are. Raises GrammarError.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object or true")
    _check_depth(schema)
    plain = _convert(schema)
    check_root_reference(plain)
    check_intersections(plain)
    parts = list(_walk(plain))
    _name_objects(parts)
    if closes_objects:
        for part in parts:
            if "properties" in part:
                part["additionalProperties"] = False
    if not any(_is_combining(part) for part in parts):
        for part in parts:
            _close(part)
        bound_numbers(parts, plain)
    pattern = DEFAULT_WHITESPACE if whitespace is None else _whitespace_pattern(whitespace)
    options = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**plain, "x-guidance": options}


def _whitespace_pattern(pattern: str) -> str:
    if not _OF_WHITESPACE.fullmatch(pattern):
        raise GrammarError(
            f"the whitespace pattern {pattern[:60]!r} may match whitespace only; use \\s, \\n, "
            "\\t, \\r, spaces, classes of them, groups and repetitions"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise GrammarError(
            f"the whitespace pattern {pattern[:60]!r} is no regular expression: {error}"
        ) from None
    # \s would match spaces that are not whitespace in JSON.
    return pattern.replace(r"\s", r"[ \t\n\r]")


def _check_depth(schema: object) -> None:
    level = [schema]
    for _ in range(_MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise GrammarError(f"the JSON schema is nested more than {_MAX_DEPTH} levels deep")


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _convert(schema: Any) -> Any:
    """A copy without keywords that change nothing and with those of old drafts in today's form."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "x-guidance" or value in _WITHOUT_EFFECT.get(key, ()):
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise GrammarError(f"{key} in the JSON schema is a boolean; it must be a number")
        if key == "multipleOf":
            _check_multiple(value)
        if key == "items" and isinstance(value, list):
            result["prefixItems"] = [_convert(item) for item in value]
        elif key == "additionalItems" and isinstance(schema.get("items"), list):
            result["items"] = _convert(value)
        elif key in _SCHEMA_KEYS:
            result[key] = _convert(value)
        elif key in _LIST_KEYS and isinstance(value, list):
            result[key] = [_convert(item) for item in value]
        elif key in _MAP_KEYS and isinstance(value, dict):
            result[key] = {name: _convert(item) for name, item in value.items()}
        else:
            result[key] = value
    name = result.get("format")
    if isinstance(name, str) and name in _PLAIN_FORMATS:
        result.setdefault("pattern", _PLAIN_FORMATS[name])
    return result


def _check_multiple(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return  # llguidance says what is wrong
    digits = f"{value:.17g}".replace(".", "").split("e")[0].strip("0")
    if len(digits) > 15 or int(digits or "0") > _MAX_MULTIPLE:
        raise GrammarError(
            f"multipleOf in the JSON schema is {value}; its digits must make a number of at most "
            f"{_MAX_MULTIPLE}"
        )


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _SCHEMA_KEYS:
            yield from _walk(value)
        elif key in _LIST_KEYS and isinstance(value, list):
            for item in value:
                yield from _walk(item)
        elif key in _MAP_KEYS and isinstance(value, dict):
            for item in value.values():
                yield from _walk(item)


def _is_combining(schema: dict[str, Any]) -> bool:
    """Whether several schemas must hold for the same value."""
    combined = [key for key in _COMBINING_KEYS if key in schema]
    if not combined:
        return False
    all_of = schema.get("allOf")
    has_siblings = len(schema.keys() - ANNOTATIONS) > 1
    return has_siblings or (isinstance(all_of, list) and len(all_of) > 1)


def _name_objects(parts: list[dict[str, Any]]) -> None:
    """Gives schemas of objects the type that their author left out.

    Not the options of a oneOf: a value that fits two of them must go on doing so.
    """
    lists = [part["oneOf"] for part in parts if isinstance(part.get("oneOf"), list)]
    options = {id(option) for options in lists for option in options}
    for part in parts:
        is_of_object = _OBJECT_KEYS & part.keys() and not _OTHER_KEYS & part.keys()
        if is_of_object and id(part) not in options:
            part["type"] = "object"


def _close(schema: dict[str, Any]) -> None:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        return
    if {"additionalProperties", "patternProperties", "unevaluatedProperties"} & schema.keys():
        return
    required = schema.get("required", [])
    if isinstance(required, list) and all(name in properties for name in required):
        schema["additionalProperties"] = False
