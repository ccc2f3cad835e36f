"""Where one sequence is in its grammar: behind the protocol of llmserve.core.grammar."""

from __future__ import annotations

import re
import threading

from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from llmserve.core.grammar import GrammarState
from llmserve.grammar.marker import Marker
from llmserve.grammar.spec import GrammarError

_SHOWN_CHARS = 300
NO_TEXT = "no text matches the grammar"
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_QUOTED_SOURCE = re.compile(r"\n +\d+ \| |<state>|<non-verbose/>")


class CompiledGrammar:
    """A grammar that holds from the first token."""

    def __init__(self, matcher: LLMatcher, num_tokens: int, num_bytes: int) -> None:
        """`matcher` knows `num_tokens`; it is at the start and stays there. Masks have
        `num_bytes`."""
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._num_bytes = num_bytes
        self._lock = threading.Lock()

    def start(self) -> GrammarState:
        with self._lock:
            return _State(self._matcher.deep_copy(), self._num_tokens, self._num_bytes)


class _State:
    def __init__(self, matcher: LLMatcher, num_tokens: int, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        # Filled again for each mask: `compute_bitmask`, which makes its own, takes 30 us longer.
        self._bits = allocate_token_bitmask(1, num_tokens)

    def mask(self) -> bytes:
        """Raises GrammarError where the grammar is too complex to go on."""
        fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            raise GrammarError(describe(self._matcher.get_error()))
        return self._bits.tobytes()[: self._num_bytes].ljust(self._num_bytes, b"\0")

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise GrammarError(describe(self._matcher.get_error()))


class DelayedGrammar:
    """A grammar that holds behind a marker."""

    def __init__(self, marker: Marker, body: CompiledGrammar) -> None:
        self._marker = marker
        self._body = body

    def start(self) -> GrammarState:
        return _DelayedState(self._marker, self._body)


class _DelayedState:
    """Invariant: `_body` is None exactly as long as the marker is not complete."""

    def __init__(self, marker: Marker, grammar: CompiledGrammar) -> None:
        self._marker = marker
        self._grammar = grammar
        self._body: GrammarState | None = None
        self._tail = b""

    def mask(self) -> bytes:
        return self._marker.mask(self._tail) if self._body is None else self._body.mask()

    def accept(self, token_id: int) -> None:
        if self._body is not None:
            self._body.accept(token_id)
            return
        tail = self._marker.append(self._tail, token_id)
        if tail is None:
            self._body = self._grammar.start()
        else:
            self._tail = tail


def describe(error: str) -> str:
    """An error of llguidance without the place in a text that the caller has not written."""
    if error.startswith("NoExtension"):
        return NO_TEXT
    error = _QUOTED_SOURCE.split(error, maxsplit=1)[0]
    error = _PLACE.sub("", error).replace("failed to compile JSON schema: ", "")
    error = error.replace("Unimplemented keys:", "unsupported keywords:")
    return " ".join(error.split())[:_SHOWN_CHARS]
