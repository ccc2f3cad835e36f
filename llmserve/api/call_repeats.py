"""Ends an output of forced calls at the first call that repeats an earlier one.

A grammar of one call or more lets a model that has said all it can go on for ever, and a model
that is held to a grammar often says the same again. The sampler's side lets nothing but an end
follow a repeated call; the answer's side leaves that call out.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llmserve.api.output_plan import OutputPlan
from llmserve.core.grammar import Grammar, GrammarState
from llmserve.tool_parsers import CallDelta


class CallHistory:
    """Calls so far, and what is held back because it may repeat one of them."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str]] = []  # name and arguments
        self._held: list[CallDelta] = []

    @property
    def has_repeat(self) -> bool:
        """Whether the last call is one of those before it."""
        return bool(self._calls) and self._calls[-1] in self._calls[:-1]

    def add(self, deltas: Sequence[CallDelta]) -> list[CallDelta]:
        """What may be given out."""
        released: list[CallDelta] = []
        for delta in deltas:
            if delta.name is not None:
                released += self.release()
                self._calls.append((delta.name, ""))
            name, arguments = self._calls[-1]
            self._calls[-1] = (name, arguments + delta.arguments)
            self._held.append(delta)
            if not self._may_repeat():
                released += self._held
                self._held = []
        return released

    def release(self) -> list[CallDelta]:
        """The last call has ended: what is held back, unless it is a repeat."""
        held, self._held = self._held, []
        return [] if self.has_repeat else held

    def _may_repeat(self) -> bool:
        name, arguments = self._calls[-1]
        return any(
            earlier == name and earlier_arguments.startswith(arguments)
            for earlier, earlier_arguments in self._calls[:-1]
        )


class UnrepeatingGrammar:
    """A grammar of calls that ends with the first repeated one."""

    def __init__(self, calls: Grammar, plan: OutputPlan, eos_token_ids: Sequence[int]) -> None:
        """`plan` tells how the output is read."""
        self._calls = calls
        self._plan = plan
        self._ends = tuple(eos_token_ids)

    def start(self) -> GrammarState:
        return _State(self._calls.start(), self._plan, self._ends)


class _State:
    def __init__(self, calls: GrammarState, plan: OutputPlan, ends: tuple[int, ...]) -> None:
        parser = plan.tool_parser()
        assert parser is not None
        self._calls = calls
        self._plan = plan
        self._ends = ends
        self._reasoning_parser = plan.reasoning_parser()
        self._tool_parser = parser
        self._history = CallHistory()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def mask(self) -> bytes:
        mask = self._calls.mask()
        if not self._history.has_repeat:
            return mask
        bits = bytearray(len(mask))
        for token_id in self._ends:
            bits[token_id // 8] |= 1 << token_id % 8
        return bytes(bits)

    def accept(self, token_id: int) -> None:
        self._calls.accept(token_id)
        if self._plan.is_hidden(token_id):
            return
        text = self._utf8.decode(self._plan.tokenizer.token_bytes(token_id))
        if self._reasoning_parser is not None:
            text = self._reasoning_parser.feed(text).content
        self._history.add(self._tool_parser.feed(text).calls)
