"""Finite automata of parts of a grammar, to find out where a text could be cut in two ways."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.grammar.char_set import ALL_CHARS, char_of, chars_of
from llmserve.grammar.gbnf import CharClass, Choice, Literal, Node, Ref, Repeat, Sequence
from llmserve.grammar.spec import GrammarError

_MAX_NFA_STATES = 5_000
_MAX_STATES = 500
_MAX_PAIRS = 5_000
_MAX_EFFORT = 500_000  # a second or two
# More repetitions count as any number: the texts become more, and so may the warnings.
_MAX_COPIES = 64


class TooLargeError(Exception):
    """The automaton would have too many states."""


class Alphabet:
    """Sets of characters that none of some char sets cuts through."""

    def __init__(self, char_sets: set[int]) -> None:
        letters = [ALL_CHARS]
        for char_set in char_sets:
            cut = [(letter & char_set, letter & ~char_set) for letter in letters]
            letters = [part for pair in cut for part in pair if part]
        self.letters = letters
        self._effort = 0

    def spend(self, effort: int) -> None:
        """Bounds the work on all automata together. Raises GrammarError."""
        self._effort += effort
        if self._effort > _MAX_EFFORT:
            raise GrammarError("the grammar is too complex")

    def spell(self, char_set: int) -> list[int]:
        """The numbers of the letters in the set."""
        return [i for i, letter in enumerate(self.letters) if letter & char_set]


class Automaton:
    """Deterministic: `steps[state][letter]` is the next state; 0 is the first one."""

    def __init__(self, node: Node, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        """`node` has no recursion. Raises TooLargeError."""
        self._alphabet = alphabet
        parts = _Nfa(rules, alphabet)
        start, end = parts.new_state(), parts.new_state()
        parts.build(node, start, end)
        self.steps: list[dict[int, int]] = []
        self.is_end: list[bool] = []
        numbers = {parts.close({start}): 0}
        states = list(numbers)
        for state in states:  # grows
            if len(states) > _MAX_STATES:
                raise TooLargeError
            self._alphabet.spend(len(state))
            self.is_end.append(end in state)
            targets: dict[int, set[int]] = {}
            for part in state:
                for letter, target in parts.steps[part]:
                    targets.setdefault(letter, set()).add(target)
            step = {}
            for letter, target_parts in targets.items():
                closed = parts.close(target_parts)
                if closed not in numbers:
                    numbers[closed] = len(states)
                    states.append(closed)
                step[letter] = numbers[closed]
            self.steps.append(step)

    def goes_on_behind(self, shorter: Automaton) -> int:
        """Characters with which a text of `shorter` goes on towards a longer text of this one.

        The empty text does not count. Raises TooLargeError.
        """
        found = 0
        seen: set[tuple[int, int]] = set()
        pairs = [(0, 0)]
        for position, (ours, theirs) in enumerate(pairs):  # grows
            if len(pairs) > _MAX_PAIRS:
                raise TooLargeError
            step = self.steps[ours]
            self._alphabet.spend(1 + len(step))
            if shorter.is_end[theirs] and position > 0:
                for letter in step:
                    found |= self._alphabet.letters[letter]
            for letter in step.keys() & shorter.steps[theirs].keys():
                pair = (step[letter], shorter.steps[theirs][letter])
                if pair not in seen:
                    seen.add(pair)
                    pairs.append(pair)
        return found


class _Nfa:
    """K. Thompson, Regular expression search algorithm, CACM 1968."""

    def __init__(self, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._rules = rules
        self._alphabet = alphabet
        self.steps: list[list[tuple[int, int]]] = []  # by state: letter and target
        self._free_steps: list[list[int]] = []

    def new_state(self) -> int:
        if len(self.steps) > _MAX_NFA_STATES:
            raise TooLargeError
        self.steps.append([])
        self._free_steps.append([])
        self._alphabet.spend(1)
        return len(self.steps) - 1

    def close(self, states: set[int]) -> frozenset[int]:
        """With the states that are reached without a character."""
        pending = list(states)
        closed = set(states)
        while pending:
            new = [state for state in self._free_steps[pending.pop()] if state not in closed]
            closed.update(new)
            pending += new
        return frozenset(closed)

    def build(self, node: Node, start: int, end: int) -> None:
        match node:
            case Literal(text):
                for char in text:
                    start = self._step(start, char_of(char))
                self._free_steps[start].append(end)
            case CharClass():
                self._free_steps[self._step(start, chars_of(node))].append(end)
            case Ref(name):
                self.build(self._rules[name], start, end)
            case Sequence(items):
                for item in items:
                    start = self._append(item, start)
                self._free_steps[start].append(end)
            case Choice(options):
                for option in options:
                    self.build(option, start, end)
            case Repeat(item, low, high):
                self._repeat(item, low, high, start, end)

    def _step(self, start: int, char_set: int) -> int:
        target = self.new_state()
        self.steps[start] += [(letter, target) for letter in self._alphabet.spell(char_set)]
        return target

    def _append(self, node: Node, start: int) -> int:
        target = self.new_state()
        self.build(node, start, target)
        return target

    def _repeat(self, item: Node, low: int, high: int | None, start: int, end: int) -> None:
        for _ in range(min(low, _MAX_COPIES)):
            start = self._append(item, start)
        if high is None or high > _MAX_COPIES:
            loop = self.new_state()
            self._free_steps[start].append(loop)
            self.build(item, loop, loop)
            start = loop
        else:
            for _ in range(high - low):
                self._free_steps[start].append(end)
                start = self._append(item, start)
        self._free_steps[start].append(end)
