"""Finds schemas that ask one value for many regular expressions at once, whose intersection could
take llguidance for ever."""

from __future__ import annotations

import urllib.parse
from typing import Any

from llmserve.grammar.schema_numbers import ANNOTATIONS
from llmserve.grammar.spec import GrammarError

_MAX_PATTERNS = 3
# Groups of several schemas that hold for one value; each choice among alternatives makes more.
_MAX_GROUPS = 20_000

_Schema = dict[str, Any]
# With each schema, how many of its anyOf and oneOf have been replaced by one of their options.
_Group = tuple[tuple[_Schema, int], ...]
_CHOICES = ("anyOf", "oneOf")


def check_intersections(schema: _Schema) -> None:
    """Raises GrammarError where more than three patterns and formats, or two multipleOf, hold for
    one value by allOf, $ref, alternatives, or properties and patternProperties of the same name."""
    _Search(schema).run()


def check_root_reference(schema: _Schema) -> None:
    """Raises GrammarError where the schema is nothing but references that go round in a circle."""
    seen: set[int] = set()
    node: object = schema
    while isinstance(node, dict) and node.keys() - ANNOTATIONS == {"$ref"}:
        if id(node) in seen:
            raise GrammarError(
                f"the $ref {str(node['$ref'])[:60]!r} in the JSON schema leads back to itself "
                "without end, so it says nothing of the value"
            )
        seen.add(id(node))
        node = _target(schema, node["$ref"])


class _Search:
    """Walks the groups; a schema is told by its identity, so that recursion ends."""

    def __init__(self, schema: _Schema) -> None:
        self._root = schema
        self._seen: set[frozenset[tuple[int, int]]] = set()
        self._pending: list[_Group] = [((schema, 0),)]
        self._num_combined = 0

    def run(self) -> None:
        while self._pending:
            group = self._pending.pop()
            key = frozenset((id(schema), num_chosen) for schema, num_chosen in group)
            if key in self._seen:
                continue
            self._seen.add(key)
            self._num_combined += len(group) > 1
            if self._num_combined > _MAX_GROUPS:
                raise GrammarError("the JSON schema combines too many alternatives and schemas")
            self._visit(group)

    def _visit(self, group: _Group) -> None:
        members = self._combined(group)
        for place, (schema, num_chosen) in enumerate(members):
            choices = [schema[key] for key in _CHOICES if isinstance(schema.get(key), list)]
            if num_chosen < len(choices):
                chosen = (schema, num_chosen + 1)
                others = (*members[:place], chosen, *members[place + 1 :])
                options = [option for option in choices[num_chosen] if isinstance(option, dict)]
                self._pending += [(*others, (option, 0)) for option in options]
                return
        schemas = [schema for schema, _ in members]
        _check(schemas)
        self._pending += [tuple((child, 0) for child in part) for part in _children(schemas)]

    def _combined(self, group: _Group) -> _Group:
        """With what allOf and $ref add, each schema once."""
        found = {id(schema): (schema, num_chosen) for schema, num_chosen in group}
        pending = [schema for schema, _ in group]
        while pending:
            schema = pending.pop()
            all_of = schema.get("allOf")
            parts = list(all_of) if isinstance(all_of, list) else []
            parts.append(_target(self._root, schema.get("$ref")))
            for part in parts:
                if isinstance(part, dict) and id(part) not in found:
                    found[id(part)] = (part, 0)
                    pending.append(part)
        return tuple(found.values())


def _target(root: _Schema, ref: object) -> object:
    """llguidance says what is wrong with a reference to nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node: object = root
    for raw in urllib.parse.unquote(ref[1:]).split("/")[1:]:
        name = raw.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict):
            node = node.get(name)
        else:
            return None
    return node


def _check(schemas: list[_Schema]) -> None:
    patterns = {str(s[key]) for s in schemas for key in ("pattern", "format") if key in s}
    if len(patterns) > _MAX_PATTERNS:
        raise GrammarError(
            f"the JSON schema holds one value to {len(patterns)} patterns and formats at once; at "
            f"most {_MAX_PATTERNS} are allowed"
        )
    if len({str(schema["multipleOf"]) for schema in schemas if "multipleOf" in schema}) > 1:
        raise GrammarError("the JSON schema holds one number to several multipleOf at once")


def _children(schemas: list[_Schema]) -> list[list[_Schema]]:
    """Groups of schemas that may hold for one part of the value."""
    of_items: list[Any] = [schema.get("items") for schema in schemas]
    groups = [of_items]
    tuples = [s["prefixItems"] for s in schemas if isinstance(s.get("prefixItems"), list)]
    for place in range(max(map(len, tuples), default=0)):
        at_place = [items[place] for items in tuples if place < len(items)]
        groups.append(at_place + (of_items if len(schemas) > 1 else []))
    of_names = [_map(schema, "properties") for schema in schemas]
    by_pattern = [_map(schema, "patternProperties") for schema in schemas]
    of_others: list[Any] = [schema.get("additionalProperties") for schema in schemas]
    if len(schemas) == 1:  # a name that fits no pattern, and is not declared
        groups.append(of_others)
        of_others = []
    for pattern in {pattern for patterns in by_pattern for pattern in patterns}:
        # llguidance wants patterns without common names; the same pattern may come twice.
        groups.append([m[pattern] for m in by_pattern if pattern in m] + of_others)
    groups.append(of_others)
    for name in {name for names in of_names for name in names}:
        own = [names[name] for names in of_names if name in names]
        fitting = [part for patterns in by_pattern for part in patterns.values()]
        if len(schemas) == 1:  # a name fits one of its patterns at most: llguidance sees to that
            groups += [[*own, part] for part in fitting]
            fitting = []
        groups.append(own + fitting + of_others)
    return [[part for part in group if isinstance(part, dict)] for group in groups]


def _map(schema: _Schema, key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}
