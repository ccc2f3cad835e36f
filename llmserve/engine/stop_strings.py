"""Finds stop strings in text that arrives piece by piece, and holds back what might begin one."""

from __future__ import annotations


class StopStringMatcher:
    """Cuts a growing text at the first stop string.

    The stop string whose last character comes first wins; a tie goes to the order of the list.
    `max(len(stop)) - 1` characters are held back until the text ends, so that no part of a stop
    string is ever emitted. Only new text plus that overlap is searched: O(new text) per call.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._num_held = max((len(s) for s in stop), default=1) - 1
        self._held = ""  # not emitted yet
        self._num_exempt = 0  # leading characters of _held that cannot be part of a match

    def feed(self, text: str, *, is_exempt: bool = False) -> tuple[str, str | None]:
        """Adds `text`; returns (text to emit now, matched stop string or None).

        Exempt text (produced before min_tokens) is delivered but never matched.
        """
        if not self._stop:
            return text, None
        self._held += text
        if is_exempt:
            self._num_exempt = len(self._held)
        match = self._find()
        if match is not None:
            end, stop = match
            cut = end if self._include_stop else end - len(stop)
            emitted, self._held = self._held[:cut], ""
            return emitted, stop
        num_emitted = max(0, len(self._held) - self._num_held)
        emitted, self._held = self._held[:num_emitted], self._held[num_emitted:]
        self._num_exempt = max(0, self._num_exempt - num_emitted)
        return emitted, None

    def flush(self) -> str:
        """The text has ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held

    def _find(self) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stop:
            start = self._held.find(stop, self._num_exempt)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best
