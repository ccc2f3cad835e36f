"""Builds grammars in llguidance's Lark dialect for answers that are free text, calls, or both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llmserve.tool_parsers.base import Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# White space in values is limited, so that no model can go on with it forever.
_WHITE_SPACE = {"whitespace_pattern": r"[ \t\n\r]{0,64}"}


def quoted(text: str) -> str:
    """The text as a Lark string; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_rule(schema: dict[str, Any]) -> str:
    """An inline rule of JSON values that a schema allows."""
    return "%json " + json.dumps({**schema, "x-guidance": _WHITE_SPACE}, ensure_ascii=False)


def pattern(regex: str) -> str:
    """A regular expression between slashes."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex) + "/"


def any_of(*texts: str) -> str:
    """A regular expression of literal texts."""
    return "(" + "|".join(_escape(text) for text in texts) + ")"


class LarkBuilder:
    """Collects rules; `build` joins them with the rule `start`."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: list[str] = []

    def rule(self, body: str, *, prefix: str = "rule", options: str = "") -> str:
        """Adds a rule; returns its name."""
        name = f"{prefix}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def either(self, bodies: list[str], *, prefix: str = "rule") -> str:
        return self.rule(" | ".join(bodies), prefix=prefix)

    def marker(self, text: str) -> str:
        """A marker: the special token if it is one, else its text."""
        token_id = self._special_tokens.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def text(self, *, without: tuple[str, ...], not_at_start: str = "") -> str:
        """Free text in which none of the marks occurs, and which does not begin with
        `not_at_start`, white space aside."""
        body = "/(?s:.*)/"
        if without:
            body += " & ~" + pattern(f"(?s:.*){any_of(*without)}(?s:.*)")
        if not_at_start:
            body += " & ~" + pattern(rf"[ \t\n\r]*{any_of(not_at_start)}(?s:.*)")
        return self._terminal(body)

    def text_up_to(self, marker: str, *, without: tuple[str, ...]) -> str:
        """Free text in which none of the marks occurs, and the marker that ends it."""
        if marker in self._special_tokens:
            return f"{self.text(without=without)} {self.marker(marker)}"
        body = pattern(f"(?s:.*){_escape(marker)}")
        others = [mark for mark in without if mark != marker]
        if others:
            body += " & ~" + pattern(f"(?s:.*){any_of(*others)}(?s:.*)")
        # Lazy: it ends with the first marker.
        return self.rule(self._terminal(body), prefix="opening", options="[lazy]")

    def answer(self, marker: str, rest: str, *, without: tuple[str, ...], is_parallel: bool) -> str:
        """Free text with units that a marker opens and `rest` goes on with."""
        opening = self.text_up_to(marker, without=without)
        closing = self.text(without=without)
        return self.build(f"({opening} {rest}){'*' if is_parallel else '?'} {closing}")

    def build(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _terminal(self, body: str) -> str:
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def call_rule(
    builder: LarkBuilder,
    tools: list[Tool],
    *,
    before_name: str,
    after_name: str,
    after_arguments: str,
    is_required: bool,
) -> str:
    """A rule of one call with JSON arguments, for each tool; the frame is literal text."""
    return builder.either(
        [
            f"{quoted(before_name + _in_json(tool.name) + after_name)} "
            f"{json_rule(arguments_schema(tool, is_required=is_required))} "
            f"{quoted(after_arguments)}"
            for tool in tools
        ],
        prefix="call",
    )


def call_list_rule(
    builder: LarkBuilder, tools: list[Tool], *, key: str, is_required: bool, is_parallel: bool
) -> str:
    """A rule of a list of calls, each `{"name": ..., key: {...}}`."""
    call = call_rule(
        builder,
        tools,
        before_name='{"name": "',
        after_name=f'", "{key}": ',
        after_arguments="}",
        is_required=is_required,
    )
    calls = repeated(call, separator=quoted(", "), is_parallel=is_parallel)
    return builder.rule(f'"[" {calls} "]"')


def arguments_schema(tool: Tool, *, is_required: bool) -> dict[str, Any]:
    """The tool's schema where calls are required or the tool is strict, else any object."""
    schema = tool.parameters if is_required or tool.is_strict else ANY_OBJECT
    return {"type": "object", **schema}


def repeated(rule: str, *, separator: str, is_parallel: bool) -> str:
    return f"{rule} ({separator} {rule})*" if is_parallel else rule


def _in_json(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _escape(text: str) -> str:
    """The text as a regular expression that matches just it."""
    return "".join(c if c.isalnum() or c in " <>_\n" or ord(c) > 127 else "\\" + c for c in text)
