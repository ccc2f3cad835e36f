"""What types a JSON schema lets a value have, and values in the text of formats that are not JSON.

A string parameter is its text; any other is JSON, or a Python literal where a model mixes them up.
Where the schema leaves the type open, a value is JSON if it parses, else a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmserve.tool_parsers.json_scanner import is_json
from llmserve.tool_parsers.python_values import python_to_json

STRING = frozenset({"string"})

# Names that tool authors use and JSON schema does not have.
_SYNONYMS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_MAX_REFERENCES = 32


def resolve(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a chain of references within the document ends at; {} where it does not."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _look_up(reference, root)
    return {}


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The declared parameters of a tool and their schemas."""
    properties = resolve(dict(parameters), parameters).get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(parameters: Mapping[str, Any]) -> list[str]:
    """The names that must be there."""
    required = resolve(dict(parameters), parameters).get("required")
    names = required if isinstance(required, list) else []
    return [name for name in names if isinstance(name, str)]


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Empty if any type will do."""
    schema = resolve(schema, root)
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(_SYNONYMS.get(str(name), str(name)) for name in names)
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and depth < _MAX_REFERENCES:
            branches = [types_of(branch, root, depth + 1) for branch in schema[key]]
            return frozenset().union(*branches) if all(branches) else frozenset()
    if isinstance(schema.get("allOf"), list) and depth < _MAX_REFERENCES:
        known = [types_of(branch, root, depth + 1) for branch in schema["allOf"]]
        known = [types for types in known if types]
        return frozenset.intersection(*known) if known else frozenset()
    return frozenset()


def value_to_json(text: str, types: frozenset[str]) -> str:
    """JSON of a parameter's text."""
    if types == STRING:
        return _string(text)
    stripped = text.strip()
    if is_json(stripped) and (
        not types or "string" not in types or (_kinds(stripped) & types and stripped[0] != '"')
    ):
        return stripped
    if types and "string" not in types:
        return python_to_json(stripped) or _string(text)
    return _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kinds(value: str) -> frozenset[str]:
    """Types of a value whose JSON begins like this."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}
    if value[0] in kinds:
        return frozenset({kinds[value[0]]})
    if value == "null":
        return frozenset({"null"})
    is_integer = not any(char in value for char in ".eE")
    return frozenset({"number", "integer"}) if is_integer else frozenset({"number"})


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _look_up(reference: str, root: Mapping[str, Any]) -> object:
    """What a JSON pointer within the document points at."""
    if not reference.startswith("#"):
        return None
    found: object = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
