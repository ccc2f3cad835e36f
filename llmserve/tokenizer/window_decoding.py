"""Decoding for vocabularies whose tokens change with their neighbours (WordPiece and others).

The text of a token is the growth of the decoded text. Only a window of the last tokens is decoded
again: from where the text last was complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_WINDOW = 32  # tokens; a run without a complete character is given up then
_NUM_PRIMING_TOKENS = 6  # of the prompt; enough context for the first token of the output


class WindowStreamDecoder:
    """Emits `decode(all ids)` in parts, given that a token depends on few neighbours."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_skipped: Callable[[int], bool],
        prompt_ids: Sequence[int],
    ) -> None:
        """`is_skipped` names tokens without text: they would be no context for others."""
        self._decode = decode
        self._is_skipped = is_skipped
        shown = [i for i in prompt_ids[-_MAX_WINDOW:] if not is_skipped(i)]
        self._window = shown[-_NUM_PRIMING_TOKENS:]
        self._num_read = len(self._window)  # leading tokens of the window that were emitted

    def step(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_read < _MAX_WINDOW:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        emitted = self._decode(self._window[: self._num_read])
        self._window = self._window[max(0, self._num_read - 1) :]
        self._num_read = len(self._window)
        return text[len(emitted) :]
