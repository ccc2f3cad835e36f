"""Structural tags: free text in which certain beginnings oblige to certain continuations.

Two definitions are in use: vLLM's older one, `{"structures": [{begin, schema, end}], "triggers"}`,
and xgrammar's `{"format": {...}}`, of which text, JSON, regular expressions and their combinations
are served; what works on single token ids is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmserve.grammar.json_schema import guidance_schema
from llmserve.grammar.lark_text import json_lark, parse_json, quote, regex_lark
from llmserve.grammar.spec import GrammarError
from llmserve.grammar.vocabulary import Vocabulary

_ANY_TEXT = "/(?s:.*)/"
_MAX_DEPTH = 32

_Format = dict[str, Any]


def structural_tag_lark(definition: object, vocabulary: Vocabulary) -> str:
    """Raises GrammarError naming what is missing or not served."""
    if not isinstance(definition, dict):
        raise GrammarError("a structural tag must be an object")
    writer = _Writer(vocabulary)
    if "format" in definition:
        start = writer.write(_object(definition, "format"))
    elif "structures" in definition:
        start = writer.write(_from_structures(definition))
    else:
        raise GrammarError("a structural tag must have format, or structures and triggers")
    return writer.lark(start)


def _from_structures(definition: _Format) -> _Format:
    tags = []
    for structure in _list(definition, "structures"):
        schema = structure.get("schema") if isinstance(structure, dict) else None
        if isinstance(schema, str):
            schema = parse_json(schema, "a schema of the structural tag")
        if not isinstance(schema, dict | bool):
            raise GrammarError("each of structures must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"type": "tag", "begin": structure.get("begin"), "end": structure.get("end")}
        tags.append({**tag, "content": content})
    return {"type": "triggered_tags", "triggers": definition.get("triggers"), "tags": tags}


class _Writer:
    """Collects rules. Expressions go into rules of their own where an attribute is needed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rules: list[str] = []
        self._depth = 0
        self._writers: dict[str, Callable[[_Format], str]] = {
            "const_string": lambda item: self._text(_text(item, "value")),
            "json_schema": self._json,
            "regex": lambda item: self._rule(regex_lark(_text(item, "pattern"))),
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": lambda item: self._tag(item, self._text(_text(item, "begin"))),
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated_tags,
            "optional": lambda item: f"({self.write(_object(item, 'content'))})?",
            "plus": lambda item: f"({self.write(_object(item, 'content'))})+",
            "star": lambda item: f"({self.write(_object(item, 'content'))})*",
        }

    def lark(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def write(self, item: _Format) -> str:
        """An expression for the format."""
        kind = item.get("type")
        writer = self._writers.get(kind) if isinstance(kind, str) else None
        if writer is None:
            raise GrammarError(
                f"the structural tag has a format of the type {str(kind)[:40]!r}; served are "
                f"{', '.join(self._writers)}"
            )
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarError(f"the structural tag is nested more than {_MAX_DEPTH} deep")
        written = writer(item)
        self._depth -= 1
        return written

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _text(self, text: str) -> str:
        parts = self._vocabulary.split(text)
        return " ".join(f"<[{p}]>" if isinstance(p, int) else quote(p) for p in parts) or '""'

    def _until(self, texts: list[str]) -> str:
        """Free text up to and including the first of `texts`."""
        options = []
        plain = []
        for text in texts:
            head, *rest = self._vocabulary.split(text) or [""]
            if isinstance(head, int):
                options.append(f"{self._rule(_ANY_TEXT)} {self._text(text)}")
            elif rest or not head:
                raise GrammarError(f"free text cannot end at {text!r}")
            else:
                plain.append(quote(head))
        if plain:
            options.append(self._rule(f"{_ANY_TEXT} ({' | '.join(plain)})", "[lazy]"))
        return _either(options)

    def _json(self, item: _Format) -> str:
        _refuse(item, "json_schema", style="json", any_order=False, excludes=[])
        limit = item.get("max_whitespace_cnt")
        if limit is not None and (not isinstance(limit, int) or not 0 <= limit <= 100):
            raise GrammarError("max_whitespace_cnt must be an integer from 0 to 100")
        whitespace = None if limit is None else f"[ \\n\\t\\r]{{1,{limit}}}" if limit else ""
        return self._rule(json_lark(guidance_schema(item.get("json_schema"), whitespace)))

    def _any_text(self, item: _Format) -> str:
        _refuse(item, "any_text", excludes=[], max_tokens=None, max_chars=None)
        return self._rule(_ANY_TEXT)

    def _sequence(self, item: _Format) -> str:
        return self._in_order(_formats(item, "elements"), "")

    def _in_order(self, items: list[_Format], end: str) -> str:
        """Formats one behind the other; free text ends where the next one begins."""
        written = []
        is_begun = False  # the beginning of this one is written
        for position, item in enumerate(items):
            following = items[position + 1] if position + 1 < len(items) else None
            if item.get("type") == "any_text" and following is not None:
                self._any_text(item)
                written.append(self._until([_beginning(following)]))
                is_begun = True
            elif is_begun:
                is_begun = False
                if item["type"] == "tag":
                    written.append(self._tag(item, ""))
            else:
                written.append(self.write(item))
        return " ".join([*written, end]).strip()

    def _or(self, item: _Format) -> str:
        return _either([self.write(element) for element in _formats(item, "elements")])

    def _tag(self, item: _Format, begin: str) -> str:
        ends = item.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            raise GrammarError("end of a tag must be a string or a list of strings")
        return f"{begin} {self._ended(_object(item, 'content'), ends)}".strip()

    def _ended(self, content: _Format, ends: list[str]) -> str:
        """Content up to and including one of `ends`."""
        if content.get("type") == "any_text" and all(ends):
            self._any_text(content)
            return self._until(ends)
        if content.get("type") == "sequence":
            items = _formats(content, "elements")
            if items[-1].get("type") == "any_text":
                return f"{self._in_order(items[:-1], '')} {self._ended(items[-1], ends)}"
        return f"{self.write(content)} {_either([self._text(end) for end in ends])}"

    def _triggered_tags(self, item: _Format) -> str:
        _refuse(item, "triggered_tags", excludes=[])
        triggers = _list(item, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError("triggers must be strings that are not empty")
        tags = _formats(item, "tags")
        groups = {trigger: self._rests(tags, trigger) for trigger in triggers}
        for tag in tags:
            if not any(_text(tag, "begin").startswith(trigger) for trigger in triggers):
                raise GrammarError(f"no trigger begins {tag['begin'][:60]!r}")
        tag_rule = self._rule(
            _either(
                [f"{self._until([t])} ({_either(rests)})" for t, rests in groups.items() if rests]
            )
        )
        first = _either([self.write({"type": "tag", **tag}) for tag in tags])
        tail = self._rule(_ANY_TEXT)
        if item.get("stop_after_first"):
            return first if item.get("at_least_one") else f"{tag_rule} | {tail}"
        lead = f"({first})" if item.get("at_least_one") else ""
        return f"{lead} {tag_rule}* {tail}".strip()

    def _rests(self, tags: list[_Format], trigger: str) -> list[str]:
        """What may come behind a trigger."""
        rests = []
        for tag in tags:
            begin = _text(tag, "begin")
            if begin.startswith(trigger):
                rest = begin[len(trigger) :]
                rests.append(self._tag(tag, self._text(rest) if rest else ""))
        return rests

    def _separated_tags(self, item: _Format) -> str:
        tags = [self.write({"type": "tag", **tag}) for tag in _formats(item, "tags")]
        tag_rule = self._rule(_either(tags))
        separator = item.get("separator")
        if not isinstance(separator, str):
            raise GrammarError("separator of tags must be a string")
        more = f"({self._text(separator)} {tag_rule})*" if separator else f"{tag_rule}*"
        some = tag_rule if item.get("stop_after_first") else f"{tag_rule} {more}"
        return some if item.get("at_least_one") else f"({some})?"


def _either(options: list[str]) -> str:
    if not options:
        raise GrammarError("the structural tag has no alternatives where it needs one")
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _beginning(item: _Format) -> str:
    """The text that a format begins with. Raises GrammarError if it is not fixed."""
    if item.get("type") == "const_string":
        return _text(item, "value")
    if item.get("type") == "tag":
        return _text(item, "begin")
    raise GrammarError("any_text must be last, or before a const_string or a tag")


def _refuse(item: _Format, kind: str, **neutral: object) -> None:
    """Raises GrammarError for a field that is set and not served."""
    for name, value in neutral.items():
        if item.get(name, value) not in (value, None):
            raise GrammarError(f"{name} of {kind} is not supported in a structural tag")


def _text(item: _Format, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise GrammarError(f"{name} in the structural tag must be a string")
    return value


def _object(item: _Format, name: str) -> _Format:
    value = item.get(name)
    if not isinstance(value, dict):
        raise GrammarError(f"{name} in the structural tag must be an object")
    return value


def _list(item: _Format, name: str) -> list[Any]:
    value = item.get(name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name} in the structural tag must be a list that is not empty")
    return value


def _formats(item: _Format, name: str) -> list[_Format]:
    items = _list(item, name)
    if not all(isinstance(element, dict) for element in items):
        raise GrammarError(f"{name} in the structural tag must be a list of objects")
    return items
