"""Grammars of parameters that are written between tags, in the order of the tool's schema.

Strings are held to enum, const, pattern and length, and cannot contain the tag that ends them;
other values are JSON that the parameter's schema allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder, json_rule, quoted
from llmserve.tool_parsers.schema_types import STRING, properties_of, required_of, resolve, types_of

_ANY_TEXT = "/(?s:.*)/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_.-]*/"
# Text that would be read as JSON of a type.
_JSON_LIKE = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": r"-?[0-9](?s:.*)",
    "number": r"-?[0-9](?s:.*)",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """The text around a key and its value."""

    open: str
    before_value: str
    after_value: str
    close: str
    separator: str  # after a parameter
    are_newlines_optional: bool = False

    def spell(self, builder: LarkBuilder, text: str) -> str:
        if not self.are_newlines_optional:
            return builder.literal(text)
        lines = [builder.literal(line) for line in text.split("\n")]
        return ' "\\n"? '.join(lines)

    def end(self, builder: LarkBuilder) -> str:
        """What follows a value that is not a string."""
        return self.spell(builder, self.after_value + self.close + self.separator)

    def text_up_to_end(self, builder: LarkBuilder, text: str) -> str:
        """A string, and what follows it."""
        body = builder.up_to(self.after_value + self.close, text=text)
        return f"{body} {self.spell(builder, self.separator)}"


def parameters_rule(
    builder: LarkBuilder, tool: Tool, tags: ParameterTags, *, is_required: bool
) -> str:
    """A rule of the parameters of a call; those of a tool that is not strict may be any."""
    if not is_required and not tool.is_strict:
        return _any_parameters(builder, tags)
    root = tool.parameters
    top = resolve(dict(root), root)
    properties = dict(properties_of(root))
    names = required_of(root)
    for name in names:
        properties.setdefault(name, {})
    if not properties and top.get("additionalProperties", True) is not False:
        return _any_parameters(builder, tags)
    members = []
    for key, schema in properties.items():
        member = builder.rule(
            f"{tags.spell(builder, tags.open + key + tags.before_value)} "
            f"{_value(builder, schema, root, tags)}",
            prefix="parameter",
        )
        members.append(member if key in names else f"{member}?")
    return builder.rule(" ".join(members) or '""', prefix="parameters")


def embedded(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a document, as a document of its own."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **schema}


def _any_parameters(builder: LarkBuilder, tags: ParameterTags) -> str:
    member = builder.rule(
        f"{builder.literal(tags.open)} {_KEY} {tags.spell(builder, tags.before_value)} "
        f"{tags.text_up_to_end(builder, _ANY_TEXT)}",
        prefix="parameter",
    )
    return f"{member}*"


def _value(
    builder: LarkBuilder, schema: object, root: Mapping[str, Any], tags: ParameterTags
) -> str:
    """The value and what ends it."""
    types = types_of(schema, root)
    resolved = resolve(schema, root)
    if types == STRING:
        return tags.text_up_to_end(builder, _string(resolved))
    end = tags.end(builder)
    if "string" not in types:
        return f"{json_rule(embedded(resolved, root))} {end}"
    alternatives = []
    for branch in _branches(resolved, types):
        if types_of(branch, root) == STRING:
            others = sorted(types - STRING)
            likes = "|".join(_JSON_LIKE[name] for name in others if name in _JSON_LIKE)
            text = f"({_string(resolve(branch, root))})"
            if likes:
                text += rf" & ~/\s*({likes})\s*/"
            alternatives.append(builder.rule(tags.text_up_to_end(builder, text)))
        else:
            alternatives.append(f"{json_rule(embedded(branch, root))} {end}")
    return f"({' | '.join(alternatives)})"


def _branches(schema: dict[str, Any], types: frozenset[str]) -> list[dict[str, Any]]:
    """A schema of strings and others as schemas of either."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return [branch for branch in schema[key] if isinstance(branch, dict)]
    if "enum" in schema:
        strings = [value for value in schema["enum"] if isinstance(value, str)]
        others = [value for value in schema["enum"] if not isinstance(value, str)]
        return [{"enum": values} for values in (strings, others) if values]
    return [{**schema, "type": "string"}, {**schema, "type": sorted(types - STRING)}]


def _string(schema: Mapping[str, Any]) -> str:
    """The body of a terminal of strings that a schema allows."""
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(options, list):
        return " | ".join(quoted(str(option)) or '""' for option in options)
    parts = []
    if isinstance(schema.get("pattern"), str):
        parts.append(_pattern(schema["pattern"]))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    return " & ".join(parts) or _ANY_TEXT


def _pattern(regex: str) -> str:
    """A pattern of a schema matches anywhere in a string unless it is anchored."""
    begins, ends = regex.startswith("^"), regex.endswith("$") and not regex.endswith("\\$")
    inner = regex[begins : len(regex) - ends]
    before, after = ("" if begins else "(?s:.*)"), ("" if ends else "(?s:.*)")
    return f"/{before}({regex_to_lark(inner, 'dw')}){after}/"
