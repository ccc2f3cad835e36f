"""Sets of characters, as far as they tell whether two texts can begin alike."""

from __future__ import annotations

from llmserve.grammar.gbnf import MAX_CODE_POINT, CharClass

_ASCII_BITS = (1 << 128) - 1
# Characters beyond ASCII count as one: those with a common first byte are not told apart by it.
_OTHERS = 1 << 128

NO_CHARS = 0
ALL_CHARS = _ASCII_BITS | _OTHERS


def chars_of(char_class: CharClass) -> int:
    """A bit for each ASCII character, and one for all others. Unions and overlaps are `|`, `&`."""
    bits = NO_CHARS
    for first, last in char_class.ranges:
        if first < 128:
            bits |= (1 << min(last, 127) + 1) - (1 << first)
        bits |= _OTHERS if last >= 128 else 0
    if not char_class.is_negated:
        return bits
    has_all_others = (128, MAX_CODE_POINT) in char_class.ranges
    return ~bits & _ASCII_BITS | (0 if has_all_others else _OTHERS)


def char_of(char: str) -> int:
    return 1 << ord(char) if ord(char) < 128 else _OTHERS
