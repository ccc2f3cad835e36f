"""Builds grammars in llguidance's Lark dialect for answers that are free text, calls, or both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llmserve.grammar.json_schema import guidance_schema
from llmserve.grammar.lark_text import quote
from llmserve.tool_parsers.base import Tool

# What may be a special token in the texts of the formats.
_MARKER = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def quoted(text: str) -> str:
    """The text as a Lark string; nothing for no text."""
    return quote(text) if text else ""


def json_rule(schema: dict[str, Any]) -> str:
    """An inline rule of JSON values that a schema allows. Raises GrammarError."""
    return "%json " + json.dumps(guidance_schema(schema, None))


def containing(*texts: str) -> str:
    """A terminal of any text that one of the texts occurs in."""
    return f"/(?s:.*)({'|'.join(map(escaped, texts))})(?s:.*)/"


def escaped(text: str) -> str:
    """The text as a regular expression that matches just it, for use between slashes."""
    return "".join(c if c.isalnum() or c in " <>_" or ord(c) > 127 else "\\" + c for c in text)


class LarkBuilder:
    """Collects rules; `build` joins them with the rule `start`."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: list[str] = []
        self._num_names = 0

    def rule(self, body: str, *, prefix: str = "rule") -> str:
        """Adds a rule; returns its name."""
        name = self.reserve(prefix)
        self.define(name, body)
        return name

    def reserve(self, prefix: str = "rule") -> str:
        """A name for a rule that refers to itself; `define` it later."""
        self._num_names += 1
        return f"{prefix}_{self._num_names}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def either(self, bodies: list[str], *, prefix: str = "rule") -> str:
        return self.rule(" | ".join(bodies), prefix=prefix)

    def literal(self, text: str) -> str:
        """The text; markers in it that are special tokens are asked for by their ids."""
        parts = _MARKER.split(text)
        tokens = [self._special_tokens.get(part) for part in parts]
        spelled = ""
        items: list[str] = []
        for part, token_id in zip(parts, tokens, strict=True):
            if token_id is None:
                spelled += part
                continue
            items += [quoted(spelled), f"<[{token_id}]>"]
            spelled = ""
        return " ".join(item for item in [*items, quoted(spelled)] if item)

    def text(self, *, without: tuple[str, ...], not_at_start: str = "") -> str:
        """Free text in which none of the marks occurs, and which does not begin with
        `not_at_start`, white space aside."""
        body = self.free_text(not_at_start)
        return self.terminal(f"{body} & ~{containing(*without)}" if without else body)

    @staticmethod
    def free_text(not_at_start: str = "") -> str:
        """A terminal's body."""
        body = "/(?s:.*)/"
        if not_at_start:
            body += rf" & ~/[ \t\n\r]*{escaped(not_at_start)}(?s:.*)/"
        return body

    def up_to(self, marker: str, *, text: str = "/(?s:.*)/", without: tuple[str, ...] = ()) -> str:
        """Text (a terminal's body) in which no mark occurs, and the first marker, which ends it."""
        marks = tuple(dict.fromkeys((marker.strip(), *without)))
        value = self.terminal(f"({text}) & ~{containing(*marks)}")
        before, name, after = (*_MARKER.split(marker, maxsplit=1), "", "")[:3]
        if name in self._special_tokens:
            value = self.terminal(f"{value} {quoted(before)}") if before else value
            return f"{value} {self.literal(name + after)}"
        return self.terminal(f"{value} {quoted(marker)}")

    def terminal(self, body: str) -> str:
        """Adds a terminal; returns its name."""
        return self.rule(body, prefix="TEXT")

    def answer(
        self,
        marker: str,
        rest: str,
        *,
        without: tuple[str, ...],
        is_required: bool,
        is_parallel: bool = False,
        separator: str = "",
        not_at_start: str = "",
    ) -> str:
        """Units that a marker opens and `rest` goes on with: one or more if they are required, with
        the separator (a rule's body) between; else any number, in free text."""
        if is_required:
            unit = self.rule(f"{self.literal(marker)} {rest}")
            return self.build(repeated(unit, separator=separator, is_parallel=is_parallel))
        opening = self.up_to(marker, text=self.free_text(not_at_start), without=without)
        closing = self.text(without=without, not_at_start=not_at_start)
        return self.build(f"({opening} {rest}){'*' if is_parallel else '?'} {closing}")

    def build(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])


def call_rule(
    builder: LarkBuilder,
    tools: list[Tool],
    *,
    before_name: str,
    after_name: str,
    after_arguments: str,
    is_required: bool,
    is_json: bool = True,
) -> str:
    """A rule of one call with JSON arguments, for each tool; the frame is literal text.

    is_json: the name is within a JSON string.
    """
    bodies = []
    for tool in tools:
        name = _in_json(tool.name) if is_json else tool.name
        arguments = json_rule(arguments_schema(tool, is_required=is_required))
        opening = builder.literal(before_name + name + after_name)
        bodies.append(f"{opening} {arguments} {builder.literal(after_arguments)}")
    return builder.either(bodies, prefix="call")


def call_list_rule(
    builder: LarkBuilder,
    tools: list[Tool],
    *,
    key: str,
    is_required: bool,
    is_parallel: bool,
    opening: str = "[",
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
    return builder.rule(f'{quoted(opening)} {calls} "]"')


def arguments_schema(tool: Tool, *, is_required: bool) -> dict[str, Any]:
    """The tool's schema where calls are required or the tool is strict, else any object."""
    schema = tool.parameters if is_required or tool.is_strict else ANY_OBJECT
    return {"type": "object", **schema}


def repeated(rule: str, *, separator: str, is_parallel: bool) -> str:
    return f"{rule} ({separator} {rule})*" if is_parallel else rule


def _in_json(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]
