"""Grammars against oracles: GBNF against a recogniser that follows its definition."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.grammar import GrammarError, GrammarKind
from llmserve.grammar.gbnf import CharClass, Choice, Literal, Node, Ref, Repeat, Sequence
from tests.grammar_builders import accepts

RULES = ("root", "x", "y")


def nodes(names: tuple[str, ...]) -> st.SearchStrategy[Node]:
    leaves = st.one_of(
        st.sampled_from(["a", "b", "ab", "ba", "é", ""]).map(Literal),
        st.sampled_from(["ab", "bc", "é"]).map(
            lambda chars: CharClass(tuple((ord(c), ord(c)) for c in chars))
        ),
        st.sampled_from(names).map(Ref),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda items: Sequence(tuple(items))),
            st.lists(inner, min_size=2, max_size=3).map(lambda items: Choice(tuple(items))),
            st.tuples(inner, st.sampled_from([(0, None), (1, None), (0, 1), (1, 2)])).map(
                lambda pair: Repeat(pair[0], *pair[1])
            ),
        ),
        max_leaves=6,
    )


def spell(node: Node) -> str:
    match node:
        case Literal(text):
            return json.dumps(text, ensure_ascii=False)
        case CharClass(ranges):
            return "[" + "".join(chr(first) for first, _ in ranges) + "]"
        case Ref(name):
            return name
        case Sequence(items):
            return "(" + " ".join(map(spell, items)) + ")"
        case Choice(options):
            return "(" + " | ".join(map(spell, options)) + ")"
        case Repeat(item, low, high):
            return f"({spell(item)}){{{low},{'' if high is None else high}}}"


class Recogniser:
    """Which ends a node can have in a text, by the definition alone, to a fixed point."""

    def __init__(self, rules: dict[str, Node], text: str) -> None:
        self.rules = rules
        self.text = text
        self.known: dict[tuple[str, int], frozenset[int]] = {}
        before = None
        while before != self.known:
            before = dict(self.known)
            for name in rules:
                for start in range(len(text) + 1):
                    self.known[name, start] = frozenset(self.ends(rules[name], start))

    def ends(self, node: Node, start: int) -> set[int]:
        match node:
            case Literal(text):
                return {start + len(text)} if self.text.startswith(text, start) else set()
            case CharClass(ranges):
                char = self.text[start : start + 1]
                is_in = char and any(first <= ord(char) <= last for first, last in ranges)
                return {start + 1} if is_in else set()
            case Ref(name):
                return set(self.known.get((name, start), ()))
            case Sequence(items):
                places = {start}
                for item in items:
                    places = {end for place in places for end in self.ends(item, place)}
                return places
            case Choice(options):
                return {end for option in options for end in self.ends(option, start)}
            case Repeat(item, low, high):
                return set(self.repeated(item, start, low, high))

    def repeated(self, item: Node, start: int, low: int, high: int | None) -> Iterator[int]:
        places = {start}
        for count in range(len(self.text) + 3):
            if count >= low:
                yield from places
            if count == high:
                return
            places = {end for place in places for end in self.ends(item, place)}


@settings(max_examples=150, deadline=None)
@given(
    rules=st.fixed_dictionaries({name: nodes(RULES) for name in RULES}),
    texts=st.lists(st.text("abcé", max_size=6), min_size=1, max_size=8),
)
def test_gbnf_accepts_what_its_definition_says(rules: dict[str, Node], texts: list[str]) -> None:
    source = "\n".join(f"{name} ::= {spell(node)}" for name, node in rules.items())
    expected = {text: len(text) in Recogniser(rules, text).known["root", 0] for text in texts}
    message = ""
    try:
        found = {text: accepts(GrammarKind.GBNF, source, text) for text in texts}
    except GrammarError as error:
        message, found = str(error), dict.fromkeys(texts, False)

    assert message in ("", "no text matches the grammar")
    assert found == expected
