"""The text of a choice without the special tokens that are not to be seen.

Parsers need the special tokens that are their markers, so the engine decodes all of them. Here
the others are taken out again: by token, so that text which only spells one stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llmserve.core import OutputDelta
from llmserve.reasoning_parsers import ReasoningParser
from llmserve.tokenizer import Tokenizer


class VisibleText:
    """Invariant: `_spans` holds, in order, where tokens lie in the visible text, each until it is
    counted; a token without text lies between two characters."""

    def __init__(self, tokenizer: Tokenizer, is_hidden: Callable[[int], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_hidden = is_hidden
        self._hidden: deque[tuple[int, int]] = deque()  # in the whole text
        self._num_decoded = 0  # characters of the whole text
        self._num_emitted = 0
        self._num_visible = 0
        self._spans: deque[tuple[int, int]] = deque()
        self.num_reasoning_tokens = 0

    def feed(self, delta: OutputDelta) -> str:
        """The visible part of the delta's text."""
        for token_id, text in zip(delta.token_ids, delta.token_texts, strict=True):
            num_visible = len(text)
            if text and self._is_hidden(token_id):
                name = self._tokenizer.token_str(token_id)
                begin = text.rfind(name) if name else -1
                if begin >= 0:
                    begin += self._num_decoded
                    self._hidden.append((begin, begin + len(name)))
                    num_visible -= len(name)
            self._spans.append((self._num_visible, self._num_visible + num_visible))
            self._num_decoded += len(text)
            self._num_visible += num_visible
        return self._emit(delta.text)

    def count_reasoning(self, parser: ReasoningParser, *, is_last: bool) -> None:
        """Counts the tokens that added to the reasoning, as far as the parser has decided."""
        while self._spans:
            begin, end = self._spans[0]
            if not is_last and max(end, begin + 1) > parser.decided:
                return
            self._spans.popleft()
            for first, last in reversed(parser.segments):
                if last <= begin:
                    break
                if first < max(end, begin + 1):
                    self.num_reasoning_tokens += 1
                    break

    def _emit(self, text: str) -> str:
        """`text`, which goes on where the last one ended, without what is hidden."""
        start = self._num_emitted
        self._num_emitted += len(text)
        if not self._hidden:
            return text
        parts, position = [], start
        while self._hidden and self._hidden[0][0] < self._num_emitted:
            begin, end = self._hidden[0]
            parts.append(text[position - start : max(begin, position) - start])
            position = min(max(end, position), self._num_emitted)
            if end > self._num_emitted:  # the rest of it is still to come
                break
            self._hidden.popleft()
        parts.append(text[position - start :])
        return "".join(parts)
