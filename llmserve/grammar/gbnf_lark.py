"""From GBNF to llguidance's Lark dialect: the same texts, in terminals as long as possible.

llguidance splits text into terminals, each as long as it can be, and masks are fast where
terminals are long. GBNF knows no terminals. So parts without recursion become terminals, unless a
terminal could swallow text that belongs to what follows it; then it is taken apart, in the end into
single characters, of which none can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from llmserve.grammar.automaton import Alphabet, Automaton, TooLargeError
from llmserve.grammar.char_set import ALL_CHARS, NO_CHARS, char_of, chars_of
from llmserve.grammar.gbnf import (
    CharClass,
    Choice,
    Literal,
    Node,
    Ref,
    Repeat,
    Sequence,
    parse_gbnf,
)
from llmserve.grammar.lark_text import quote
from llmserve.grammar.spec import GrammarError

_EMPTY = Sequence(())
_NAME = re.compile(r"\w+")


def gbnf_to_lark(source: str) -> str:
    """Raises GrammarError."""
    return _Translation(parse_gbnf(source)).lark()


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the texts of a part begin."""

    is_nullable: bool = False
    first: int = NO_CHARS

    def then(self, other: _Shape) -> _Shape:
        if not self.is_nullable:
            return self
        return _Shape(other.is_nullable, self.first | other.first)

    def otherwise(self, other: _Shape) -> _Shape:
        return _Shape(self.is_nullable or other.is_nullable, self.first | other.first)


@dataclass(slots=True)
class _Terminal:
    name: str
    shape: _Shape
    automaton: Automaton | None  # None: too large
    follow: int = NO_CHARS  # what may come behind it


@dataclass(slots=True)
class _Translation:
    rules: dict[str, Node]
    _recursive: set[str] = field(default_factory=set)
    _rule_shapes: dict[str, _Shape] = field(default_factory=dict)
    _apart: set[Node] = field(default_factory=set)  # parts that are no terminals
    _terminals: dict[Node, _Terminal] = field(default_factory=dict)
    _rule_follow: dict[str, int] = field(default_factory=dict)
    _automata: dict[Node, Automaton | None] = field(default_factory=dict)
    _alphabet: Alphabet = field(init=False)

    def __post_init__(self) -> None:
        self._alphabet = Alphabet({s for node in self.rules.values() for s in _char_sets(node)})

    def lark(self) -> str:
        self._drop_endless()
        self._find_recursion()
        self.rules = {name: self._gather(node) for name, node in self.rules.items()}
        self._find_shapes()
        while True:
            self._find_terminals()
            conflicts = self._conflicts()
            if not conflicts:
                return self._spell()
            self._apart |= conflicts

    def _drop_endless(self) -> None:
        """Leaves out what no text can come of, as x ::= "a" x: llguidance would follow it."""
        ending: set[str] = set()
        while found := {
            n for n, node in self.rules.items() if n not in ending and _without(node, ending)
        }:
            ending |= found
        pruned = {name: _without(node, ending) for name, node in self.rules.items()}
        self.rules = {name: node for name, node in pruned.items() if node is not None}
        if "root" not in self.rules:
            raise GrammarError("no text matches the grammar")

    def _find_recursion(self) -> None:
        """Rules that are used by themselves, or use such rules."""
        uses = {name: _refs(node) for name, node in self.rules.items()}
        # A rule is plain once all that it uses are.
        plain: set[str] = set()
        while found := {n for n, used in uses.items() if n not in plain and used <= plain}:
            plain |= found
        self._recursive = self.rules.keys() - plain

    def _gather(self, node: Node) -> Node:
        """Puts options without recursion together, so that they may become one terminal."""
        match node:
            case Sequence(items):
                return Sequence(tuple(map(self._gather, items)))
            case Repeat(item, low, high):
                return Repeat(self._gather(item), low, high)
            case Choice(options):
                plain: list[Node] = []
                others: list[Node] = []
                for option in options:
                    is_plain = not _refs(option) & self._recursive
                    (plain if is_plain else others).append(self._gather(option))
                if len(plain) < 2 or not others:
                    return node
                return Choice((*others, Choice(tuple(plain))))
            case _:
                return node

    def _find_shapes(self) -> None:
        self._rule_shapes = {name: _Shape() for name in self.rules}
        while True:
            shapes = {name: self._shape(node) for name, node in self.rules.items()}
            if shapes == self._rule_shapes:
                return
            self._rule_shapes = shapes

    def _shape(self, node: Node) -> _Shape:
        self._alphabet.spend(1)
        match node:
            case Literal(text):
                return _Shape(first=char_of(text[0])) if text else _Shape(is_nullable=True)
            case CharClass():
                return _Shape(first=chars_of(node))
            case Ref(name):
                return self._rule_shapes[name]
            case Sequence(items):
                shape = _Shape(is_nullable=True)
                for item in items:
                    shape = shape.then(self._shape(item))
                return shape
            case Choice(options):
                shape = self._shape(options[0])
                for option in options[1:]:
                    shape = shape.otherwise(self._shape(option))
                return shape
            case Repeat(item, low, high):
                shape = _Shape(is_nullable=True) if high == 0 else self._shape(item)
                return shape.otherwise(_Shape(is_nullable=True)) if low == 0 else shape

    def _is_terminal(self, node: Node) -> bool:
        return node != _EMPTY and node not in self._apart and not _refs(node) & self._recursive

    def _find_terminals(self) -> None:
        """Walks the rules that are used, until it is known what may follow each part."""
        self._terminals, self._rule_follow = {}, {"root": NO_CHARS}
        while True:
            before = dict(self._rule_follow)
            count = len(self._terminals)
            for name in list(self._rule_follow):
                self._walk(self.rules[name], self._rule_follow[name])
            if before == self._rule_follow and count == len(self._terminals):
                return

    def _walk(self, node: Node, follow: int) -> None:
        self._alphabet.spend(1)
        if self._is_terminal(node):
            terminal = self._terminals.get(node)
            if terminal is None:
                name = f"T{len(self._terminals)}"
                terminal = _Terminal(name, self._shape(node), self._automaton(node))
                self._terminals[node] = terminal
            terminal.follow |= follow
            return
        match node:
            case Ref(name):
                self._rule_follow[name] = self._rule_follow.get(name, NO_CHARS) | follow
            case Literal(text):
                self._walk(_chars(text), follow)
            case Sequence(items):
                for item in reversed(items):
                    self._walk(item, follow)
                    shape = self._shape(item)
                    follow = shape.first | (follow if shape.is_nullable else NO_CHARS)
            case Choice(options):
                for option in options:
                    self._walk(option, follow)
            case Repeat(item, _, high):
                again = NO_CHARS if high in (0, 1) else self._shape(item).first
                self._walk(item, follow | again)

    def _automaton(self, node: Node) -> Automaton | None:
        if node not in self._automata:
            try:
                self._automata[node] = Automaton(node, self.rules, self._alphabet)
            except TooLargeError:
                self._automata[node] = None
        return self._automata[node]

    def _conflicts(self) -> set[Node]:
        """Terminals that could swallow what follows them, or what follows a shorter one."""
        found = set()
        for node, longer in self._terminals.items():
            for shorter in self._terminals.values():
                self._alphabet.spend(1)
                is_alike = longer.shape.first & shorter.shape.first
                if is_alike and _goes_on(longer, shorter) & shorter.follow:
                    found.add(node)
                    break
        return found

    def _spell(self) -> str:
        lines = [f"start: {_rule_name('root')}"]
        lines += [f"{_rule_name(n)}: {self._spell_node(self.rules[n])}" for n in self._rule_follow]
        plain = {name for node in self._terminals for name in self._reachable(node)}
        lines += [
            f"{_plain_name(name)}: {_spell_plain(self.rules[name])}" for name in sorted(plain)
        ]
        lines += [f"{t.name}: {_spell_plain(node)}" for node, t in self._terminals.items()]
        return "\n".join(lines) + "\n"

    def _reachable(self, node: Node) -> set[str]:
        names: set[str] = set()
        new = _refs(node)
        while new:
            names |= new
            new = set().union(*(_refs(self.rules[name]) for name in new)) - names
        return names

    def _spell_node(self, node: Node) -> str:
        if node in self._terminals:
            return self._terminals[node].name
        match node:
            case Ref(name):
                return _rule_name(name)
            case Literal(text):
                return self._spell_node(_chars(text))
            case Sequence(items):
                return " ".join(self._group(item) for item in items) or '""'
            case Choice(options):
                return " | ".join(self._spell_node(option) for option in options)
            case Repeat(item, low, high):
                return _spell_repeat(self._group(item), low, high)
            case CharClass():
                return _spell_class(node)

    def _group(self, node: Node) -> str:
        text = self._spell_node(node)
        return text if _NAME.fullmatch(text) else f"({text})"


def _goes_on(longer: _Terminal, shorter: _Terminal) -> int:
    """Characters with which a text of the shorter terminal goes on in the longer one."""
    if longer.automaton is None or shorter.automaton is None:
        return ALL_CHARS
    try:
        return longer.automaton.goes_on_behind(shorter.automaton)
    except TooLargeError:
        return ALL_CHARS


def _refs(node: Node) -> set[str]:
    match node:
        case Ref(name):
            return {name}
        case Sequence(children) | Choice(children):
            return set().union(*map(_refs, children))
        case Repeat(item):
            return _refs(item)
        case _:
            return set()


def _without(node: Node, ending: set[str]) -> Node | None:
    """The part without uses of rules that do not end; None if nothing is left of it."""
    match node:
        case Ref(name):
            return node if name in ending else None
        case Sequence(items):
            kept = [left for item in items if (left := _without(item, ending)) is not None]
            return Sequence(tuple(kept)) if len(kept) == len(items) else None
        case Choice(options):
            kept = [left for option in options if (left := _without(option, ending)) is not None]
            return Choice(tuple(kept)) if kept else None
        case Repeat(item, low, high):
            left = _without(item, ending)
            if left is None:
                return _EMPTY if low == 0 else None
            return Repeat(left, low, high)
        case _:
            return node


def _char_sets(node: Node) -> set[int]:
    match node:
        case Literal(text):
            return {char_of(char) for char in text}
        case CharClass():
            return {chars_of(node)}
        case Sequence(children) | Choice(children):
            return set().union(*map(_char_sets, children))
        case Repeat(item):
            return _char_sets(item)
        case _:
            return set()


def _chars(text: str) -> Sequence:
    return Sequence(tuple(CharClass(((ord(char), ord(char)),)) for char in text))


def _rule_name(name: str) -> str:
    """Lark tells rules from terminals by case; names that differ in case only must not meet."""
    return "r_" + "".join(c if c.islower() or c.isdigit() else f"_{ord(c):x}_" for c in name)


def _plain_name(name: str) -> str:
    return _rule_name(name).upper()


def _spell_plain(node: Node) -> str:
    """A part without recursion, in a terminal."""
    match node:
        case Ref(name):
            return _plain_name(name)
        case Literal(text):
            return quote(text)
        case CharClass():
            return _spell_class(node)
        case Sequence(items):
            return " ".join(_group_plain(item) for item in items) or '""'
        case Choice(options):
            return " | ".join(_spell_plain(option) for option in options)
        case Repeat(item, low, high):
            return _spell_repeat(_group_plain(item), low, high)


def _group_plain(node: Node) -> str:
    text = _spell_plain(node)
    return text if isinstance(node, Literal | CharClass | Ref) else f"({text})"


def _spell_repeat(item: str, low: int, high: int | None) -> str:
    if high == 0:
        return '""'
    if high is None:
        return item + ("*" if low == 0 else "+" if low == 1 else f"{{{low},}}")
    return item + ("?" if (low, high) == (0, 1) else f"{{{low},{high}}}")


def _spell_class(char_class: CharClass) -> str:
    if char_class.is_negated and not char_class.ranges:
        return "/(?s:.)/"
    ranges = "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in char_class.ranges)
    return f"/[{'^' if char_class.is_negated else ''}{ranges}]/"
