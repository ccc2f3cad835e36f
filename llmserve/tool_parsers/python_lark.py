"""Grammars of Python calls whose keyword arguments satisfy a tool's schema.

Keywords come in the order of the schema. Booleans, None, lists, dictionaries and choices are in
Python's syntax; what a schema says beyond types, members and choices is left to JSON, which the
parser takes as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder, json_rule, quoted
from llmserve.tool_parsers.parameter_lark import embedded
from llmserve.tool_parsers.schema_types import properties_of, required_of, resolve, types_of

_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"
_SINGLE_QUOTED = r"/'([^'\\\x00-\x1f]|\\['\\nt])*'/"
_ANNOTATIONS = {"title", "description", "default", "examples", "$defs", "definitions", "$schema"}
_SIMPLE = {
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
    "string": {"type"},
}


def call_list(
    builder: LarkBuilder, tools: list[Tool], *, is_required: bool, is_parallel: bool
) -> str:
    """A rule of `[call, ...]`."""
    call = builder.either([_call(builder, tool, is_required=is_required) for tool in tools])
    more = f'(", " {call})*' if is_parallel else ""
    return builder.rule(f'"[" {call} {more} "]"')


def _call(builder: LarkBuilder, tool: Tool, *, is_required: bool) -> str:
    root = tool.parameters
    values = _PythonValues(builder, root)
    top = resolve(dict(root), root)
    properties = properties_of(root)
    is_open = not properties and top.get("additionalProperties", True) is not False
    required = required_of(root)
    if (not is_required and not tool.is_strict) or (is_open and not required):
        member = builder.rule(f'{_KEY} "=" {values.any_value()}')
        arguments = f'({member} (", " {member})*)?'
    else:
        declared = {**properties, **{name: {} for name in required if name not in properties}}
        members = [
            (f"{quoted(key + '=')} {values.value(schema)}", key in required)
            for key, schema in declared.items()
        ]
        arguments = separated(builder, members)
    return f'{quoted(tool.name + "(")} {arguments} ")"'


def separated(builder: LarkBuilder, members: list[tuple[str, bool]]) -> str:
    """The members in their order, with commas between; those that are not required may lack."""
    named = [(builder.rule(body), is_required) for body, is_required in members]
    tail = ""
    first: list[str] = [""]
    for name, is_required in reversed(named):
        starts = f"{name} {tail}"
        first = [starts] if is_required else [starts, *first]
        tail = builder.rule(f'", " {name} {tail}' if is_required else f'(", " {name})? {tail}')
    body = " | ".join(option for option in first if option)
    return f"({body}){'' if all(first) else '?'}" if body else ""


class _PythonValues:
    """Rules of the values that the schemas of one document allow."""

    def __init__(self, builder: LarkBuilder, root: Mapping[str, Any]) -> None:
        self._builder = builder
        self._root = root
        self._references: dict[str, str] = {}

    def any_value(self) -> str:
        return f'({json_rule({})} | "True" | "False" | "None" | {_SINGLE_QUOTED})'

    def value(self, schema: object) -> str:
        """An expression."""
        if not isinstance(schema, dict) or not schema.keys() - _ANNOTATIONS:
            return self.any_value()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference)
        if "const" in schema:
            return _choice([schema["const"]])
        if isinstance(schema.get("enum"), list):
            return _choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema.keys() - _ANNOTATIONS == {key}:
                return f"({' | '.join(self.value(branch) for branch in schema[key])})"
        types = sorted(types_of(schema, self._root))
        if not types or not isinstance(schema.get("type"), str | list):
            return json_rule(embedded(schema, self._root))
        return f"({' | '.join(self._of_type(schema, name) for name in types)})"

    def _of_type(self, schema: dict[str, Any], name: str) -> str:
        if name == "boolean":
            return '"True" | "False"'
        if name == "null":
            return '"None"'
        is_simple = schema.keys() - _ANNOTATIONS <= _SIMPLE.get(name, set())
        if is_simple and name == "array" and _has_counts(schema):
            return self._list(schema)
        if is_simple and name == "object" and properties_of(schema):
            return self._dictionary(schema)
        rule = json_rule(embedded({**schema, "type": name}, self._root))
        return f"{rule} | {_SINGLE_QUOTED}" if is_simple and name == "string" else rule

    def _list(self, schema: dict[str, Any]) -> str:
        item = self._builder.rule(self.value(schema.get("items")))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        upper = "" if most is None else most - 1
        body = f'{item} (", " {item}){{{max(least - 1, 0)},{upper}}}'
        return f'"[" ({body}){"" if least else "?"} "]"'

    def _dictionary(self, schema: dict[str, Any]) -> str:
        required = required_of(schema)
        declared = properties_of(schema)
        members = [
            (f"{_choice([key])} {quoted(': ')} {self.value(value)}", key in required)
            for key, value in {**{key: {} for key in required}, **declared}.items()
        ]
        return f'"{{" {separated(self._builder, members)} "}}"'

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = self._builder.reserve()
            target = resolve({"$ref": reference}, self._root)
            self._builder.define(name, self.value(target))
        return self._references[reference]


def _has_counts(schema: dict[str, Any]) -> bool:
    counts = [schema[key] for key in ("minItems", "maxItems") if key in schema]
    return all(isinstance(count, int) and count >= 0 for count in counts)


def _choice(options: list[Any]) -> str:
    spelled: list[str] = []
    for option in options:
        spelled.append(repr(option))
        if isinstance(option, str):
            spelled.append(json.dumps(option, ensure_ascii=False))
    return f"({' | '.join(quoted(text) for text in dict.fromkeys(spelled))})"
