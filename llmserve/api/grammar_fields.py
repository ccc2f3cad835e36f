"""Request fields that constrain the output, as GrammarSpecs: response_format, structured_outputs
and the older guided_* fields. Whether a grammar can be compiled is found out later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import orjson

from llmserve.api.fields import checked, refuse, text_list
from llmserve.errors import RequestError
from llmserve.grammar import GrammarKind, GrammarSpec

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})
# Settings of vLLM's backends that do not change which outputs are valid.
_HINTS = frozenset({"disable_fallback", "_backend", "_backend_was_auto"})


def _response_format(value: object, field: str) -> GrammarSpec | None:
    """None for `text`. Raises RequestError."""
    kinds = "an object with the type text, json_object, json_schema or structural_tag"
    if not isinstance(value, dict):
        refuse(field, value, kinds)
    kind = value.get("type")
    if kind not in _FORMATS:
        refuse(f"{field}.type", kind, kinds)
    if kind == "json_object":
        return GrammarSpec(GrammarKind.JSON_OBJECT, "")
    if kind == "json_schema":
        return _named_schema(value.get("json_schema"), f"{field}.json_schema")
    if kind == "structural_tag":
        return _structural_tag(value, field)
    return None


def unknown_format_keys(value: object) -> set[str]:
    """Keys of response_format that have no effect, with the field's name before them."""
    if not isinstance(value, dict) or value.get("type") == "structural_tag":
        return set()
    field, known = "response_format", {"type"}
    names: set[str] = set()
    schema = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(schema, dict):
        known.add("json_schema")
        names = {f"{field}.json_schema.{key}" for key in schema.keys() - _SCHEMA_KEYS}
    return names | {f"{field}.{key}" for key in value.keys() - known if value[key] is not None}


def _structured_outputs(value: object, field: str) -> GrammarSpec | None:
    """None for an object that sets nothing. Raises RequestError."""
    if not isinstance(value, dict):
        refuse(field, value, f"an object with one of {', '.join(_READERS)}")
    present = {name: item for name, item in value.items() if item is not None}
    asked = [name for name in _READERS if name in present]
    if present.get("json_object") is False:
        asked.remove("json_object")
    if len(asked) > 1:
        raise RequestError(
            f"{field} has {' and '.join(asked)}; it must have one of them", param=field
        )
    for name in present:
        if name not in _READERS and name not in _HINTS and name not in _OPTIONS:
            raise RequestError(
                f"{field}.{name[:60]} is unknown; allowed are {', '.join((*_READERS, *_OPTIONS))}",
                param=field,
            )
    if not asked:
        if present.keys() <= _HINTS | {"json_object"}:
            return None
        raise RequestError(f"{field} must have one of {', '.join(_READERS)}", param=field)
    spec = _READERS[asked[0]](present[asked[0]], f"{field}.{asked[0]}")
    return _with_options(spec, present, field)


def _json_schema(value: object, field: str) -> GrammarSpec:
    """A schema, or its text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"{field} is not valid JSON: {error}", param=field) from None
    if not isinstance(value, dict | bool):
        refuse(field, value, "a JSON schema")
    return GrammarSpec(GrammarKind.JSON_SCHEMA, _dump(value, field))


def _regex(value: object, field: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, _text(value, field))


def _choice(value: object, field: str) -> GrammarSpec:
    if not text_list(value, field):
        refuse(field, value, "a list of at least one string that is not empty")
    return GrammarSpec(GrammarKind.CHOICE, _dump(value, field))


def _grammar(value: object, field: str) -> GrammarSpec:
    """A context-free grammar: GBNF or EBNF with `::=`, else Lark."""
    text = _text(value, field)
    return GrammarSpec(GrammarKind.GBNF if "::=" in text else GrammarKind.LARK, text)


def _structural_tag(value: object, field: str) -> GrammarSpec:
    """The definition, or its text."""
    if isinstance(value, str):
        return GrammarSpec(GrammarKind.STRUCTURAL_TAG, value)
    if not isinstance(value, dict):
        refuse(field, value, "an object or its text as JSON")
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, _dump(value, field))


def _json_object(value: object, field: str) -> GrammarSpec:
    if value is not True:
        refuse(field, value, "a boolean")
    return GrammarSpec(GrammarKind.JSON_OBJECT, "")


_READERS: dict[str, Callable[[object, str], GrammarSpec]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
_OTHER_MEMBERS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.LARK: "grammar",
    GrammarKind.GBNF: "grammar",
}
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def _named_schema(value: object, field: str) -> GrammarSpec:
    """`strict` changes nothing: the schema is always enforced."""
    if not isinstance(value, dict):
        refuse(field, value, "an object with name and schema")
    name, strict = value.get("name"), value.get("strict")
    if name is not None and (not isinstance(name, str) or not 1 <= len(name) <= 256):
        refuse(f"{field}.name", name, "a string of 1 to 256 characters")
    if strict is not None and not isinstance(strict, bool):
        refuse(f"{field}.strict", strict, "a boolean")
    schema = value.get("schema")
    if not isinstance(schema, dict | bool):
        refuse(f"{field}.schema", schema, "a JSON schema")
    return _json_schema(schema, f"{field}.schema")


def _with_options(spec: GrammarSpec, present: dict[str, Any], field: str) -> GrammarSpec:
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(present.get(name, False), bool):
            refuse(f"{field}.{name}", present[name], "a boolean")
    is_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
    asked = [name for name in _OPTIONS if present.get(name) not in (None, False)]
    if asked and not is_json:
        raise RequestError(f"{field}.{asked[0]} goes with json or json_object only", param=field)
    if "disable_additional_properties" in asked:
        spec = dataclasses.replace(spec, closes_objects=True)
    if "whitespace_pattern" in asked:
        if "disable_any_whitespace" in asked:
            raise RequestError(
                f"{field} has whitespace_pattern and disable_any_whitespace; set one of them",
                param=field,
            )
        return with_whitespace(spec, present["whitespace_pattern"], f"{field}.whitespace_pattern")
    if "disable_any_whitespace" in asked:
        return dataclasses.replace(spec, whitespace="")
    return spec


def member_of(spec: GrammarSpec) -> str:
    """The member of structured_outputs that such a grammar comes from."""
    return _OTHER_MEMBERS.get(spec.kind, spec.kind.value)


def with_whitespace(spec: GrammarSpec, pattern: object, field: str) -> GrammarSpec:
    """The same with other whitespace between the parts of JSON."""
    return dataclasses.replace(spec, whitespace=_text(pattern, field))


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(field, value, "a string that is not empty")
    return value


def _dump(value: object, field: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise RequestError(
            f"{field} is nested too deeply or holds too large a number", param=field
        ) from None


_TEXT = {"type": "string"}
_SCHEMA_OR_TEXT = {"type": ["object", "string"]}
_CHOICES = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": list(_FORMATS)},
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "schema": {"type": ["object", "boolean"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_OUTPUTS = {
    "type": "object",
    "properties": {
        "json": _SCHEMA_OR_TEXT,
        "regex": _TEXT,
        "choice": _CHOICES,
        "grammar": _TEXT,
        "json_object": {"type": "boolean"},
        "structural_tag": _SCHEMA_OR_TEXT,
        "whitespace_pattern": _TEXT,
        "disable_any_whitespace": {"type": "boolean"},
        "disable_additional_properties": {"type": "boolean"},
    },
}

ResponseFormat = Annotated[GrammarSpec | None, checked(_response_format, _FORMAT)]
StructuredOutputs = Annotated[GrammarSpec | None, checked(_structured_outputs, _OUTPUTS)]
GuidedJson = Annotated[GrammarSpec, checked(_json_schema, _SCHEMA_OR_TEXT)]
GuidedRegex = Annotated[GrammarSpec, checked(_regex, _TEXT)]
GuidedChoice = Annotated[GrammarSpec, checked(_choice, _CHOICES)]
GuidedGrammar = Annotated[GrammarSpec, checked(_grammar, _TEXT)]
