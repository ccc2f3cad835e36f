"""Reads GBNF, the grammar notation of llama.cpp (xgrammar's EBNF is close to it), into a tree.

    root ::= "x" item{1,3} | [^a-c\\n]+   # a comment

A rule ends where the next one begins, so that alternatives may stand on lines of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from llmserve.grammar.spec import GrammarError

MAX_CODE_POINT = 0x10FFFF
_MAX_NODES = 50_000
_MAX_DEPTH = 64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_RULE_HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)(?:[ \t\r\n]|#[^\n]*)*::=")
_BOUNDS = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character within the ranges (both ends included), or outside of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None  # None: any number


Node = Literal | CharClass | Ref | Sequence | Choice | Repeat

ANY_CHAR = CharClass(((0, MAX_CODE_POINT),))


def parse_gbnf(source: str) -> dict[str, Node]:
    """The rules by name; `root` is the whole text. Raises GrammarError."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise GrammarError("the grammar has no rule named root")
    for name, node in rules.items():
        for missing in _names_in(node) - rules.keys():
            raise GrammarError(f"the rule {name} uses {missing}, which is not defined")
    return rules


def _names_in(node: Node) -> set[str]:
    match node:
        case Ref(name):
            return {name}
        case Sequence(children) | Choice(children):
            return set().union(*map(_names_in, children))
        case Repeat(item):
            return _names_in(item)
        case _:
            return set()


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._num_nodes = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip_space()
        while self._at < len(self._source):
            head = _RULE_HEAD.match(self._source, self._at)
            if head is None:
                self._fail("a rule (name ::= ...)")
            if head[1] in rules:
                raise GrammarError(f"the rule {head[1]} is defined twice")
            self._at = head.end()
            self._skip_space()
            rules[head[1]] = self._choice()
        return rules

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarError(f"the grammar has groups nested more than {_MAX_DEPTH} deep")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise GrammarError(f"the grammar has more than {_MAX_NODES} parts")
        char = self._source[self._at : self._at + 1]
        if char in ("", "|", ")"):
            return None
        if char in ('"', "'"):
            return self._literal(char)
        if char == "[":
            return self._char_class()
        if char == ".":
            self._take(".")
            return ANY_CHAR
        if char == "(":
            self._take("(")
            node = self._choice()
            if not self._take(")"):
                self._fail("a closing parenthesis")
            return node
        name = _NAME.match(self._source, self._at)
        if name is None:
            self._fail('a name, "text", [characters], a group, or the next rule')
        if _RULE_HEAD.match(self._source, self._at):
            return None
        self._at = name.end()
        self._skip_space()
        return Ref(name[0])

    def _repeated(self, item: Node) -> Node:
        while True:
            if self._take("*"):
                item = Repeat(item, 0, None)
            elif self._take("+"):
                item = Repeat(item, 1, None)
            elif self._take("?"):
                item = Repeat(item, 0, 1)
            elif self._source.startswith("{", self._at):
                item = self._bounded(item)
            else:
                return item

    def _bounded(self, item: Node) -> Node:
        bounds = _BOUNDS.match(self._source, self._at)
        if bounds is None or not (bounds[1] or bounds[3]):
            self._fail("a number of repetitions such as {2}, {2,} or {2,5}")
        self._at = bounds.end()
        self._skip_space()
        low = int(bounds[1] or 0)
        if not bounds[2]:
            return Repeat(item, low, low)
        high = int(bounds[3]) if bounds[3] else None
        if high is not None and high < low:
            raise GrammarError(f"the repetition {bounds[0]} in the grammar has its bounds reversed")
        return Repeat(item, low, high)

    def _literal(self, quote: str) -> Node:
        self._at += 1
        chars = []
        while not self._source.startswith(quote, self._at):
            if self._source[self._at : self._at + 1] in ("", "\n"):
                self._fail(f"a closing {quote}")
            chars.append(chr(self._char()))
        self._at += 1
        self._skip_space()
        return Literal("".join(chars))

    def _char_class(self) -> Node:
        self._at += 1
        is_negated = self._source.startswith("^", self._at)
        self._at += is_negated
        ranges = []
        while not self._source.startswith("]", self._at):
            first = last = self._char()
            is_range = self._source.startswith("-", self._at)
            if is_range and not self._source.startswith("-]", self._at):
                self._at += 1
                last = self._char()
            if last < first:
                raise GrammarError("a range of characters in the grammar has its ends reversed")
            ranges.append((first, last))
        self._at += 1
        self._skip_space()
        if not ranges and not is_negated:
            raise GrammarError("the grammar has a class [] of no characters")
        return CharClass(tuple(ranges), is_negated)

    def _char(self) -> int:
        """One character of a literal or a class, as a code point."""
        char = self._source[self._at : self._at + 1]
        if not char:
            self._fail("more text")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._source[self._at : self._at + 1]
        self._at += 1
        num_digits = _HEX_DIGITS.get(kind)
        if num_digits is None:
            return ord(_ESCAPES.get(kind, kind or "\\"))
        digits = self._source[self._at : self._at + num_digits]
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{num_digits}}}", digits):
            self._fail(f"{num_digits} hexadecimal digits")
        self._at += num_digits
        code = int(digits, 16)
        if code > MAX_CODE_POINT or 0xD800 <= code < 0xE000:
            raise GrammarError(f"the grammar has \\{kind}{digits}, which is no character")
        return code

    def _take(self, char: str) -> bool:
        if not self._source.startswith(char, self._at):
            return False
        self._at += 1
        self._skip_space()
        return True

    def _skip_space(self) -> None:
        space = _SPACE.match(self._source, self._at)
        assert space is not None
        self._at = space.end()

    def _fail(self, expected: str) -> NoReturn:
        line = self._source.count("\n", 0, self._at) + 1
        found = self._source[self._at : self._at + 20] or "its end"
        raise GrammarError(f"line {line} of the grammar has {found!r}; expected {expected}")
