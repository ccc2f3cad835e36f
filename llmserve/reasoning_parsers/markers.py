"""Looks for markers in text whose end is still open."""

from __future__ import annotations

from collections.abc import Iterable


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """The marker that begins first, the longest of those that begin there; None without one."""
    found = [(position, -len(m), m) for m in markers if (position := text.find(m)) >= 0]
    if not found:
        return None
    position, _, marker = min(found)
    return position, marker


def open_overlap(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins a marker but is not a whole one."""
    longest = 0
    for marker in markers:
        for size in range(min(len(text), len(marker) - 1), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
