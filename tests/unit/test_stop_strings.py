"""StopStringMatcher against a search of the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llmserve.engine.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def run(
    stop: list[str], pieces: list[str], *, include_stop: bool = False
) -> tuple[str, str | None, list[str]]:
    """Feeds pieces until a stop string completes; returns text, match and the emitted parts."""
    matcher = StopStringMatcher(tuple(stop), include_stop=include_stop)
    parts = []
    for piece in pieces:
        part, matched = matcher.feed(piece)
        parts.append(part)
        if matched is not None:
            return "".join(parts), matched, parts
    parts.append(matcher.flush())
    return "".join(parts), None, parts


def expected(stop: list[str], text: str) -> tuple[str, str | None]:
    """The earliest completed stop string, by brute force over prefixes of the text."""
    for end in range(len(text) + 1):
        for candidate in stop:
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


@given(STOPS, st.lists(st.text(alphabet="abc", max_size=1), max_size=24))
def test_single_characters_give_the_earliest_match(stop: list[str], pieces: list[str]) -> None:
    text, matched, _ = run(stop, pieces)

    assert (text, matched) == expected(stop, "".join(pieces))


@given(STOPS, LETTERS, st.lists(st.integers(0, 24), max_size=5))
def test_result_does_not_depend_on_where_the_text_is_cut(
    stop: list[str], text: str, cuts: list[int]
) -> None:
    borders = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]

    got, matched, _ = run(stop, pieces)

    want, _ = expected(stop, text)
    assert got == want
    assert (matched is None) == (want == text and not any(s in text for s in stop))


@given(STOPS, st.lists(st.text(alphabet="abc", max_size=3), max_size=12))
def test_no_emitted_prefix_contains_a_part_of_the_match(stop: list[str], pieces: list[str]) -> None:
    text, matched, parts = run(stop, pieces)

    so_far = ""
    for part in parts:
        so_far += part
        assert text.startswith(so_far)
    if matched is not None:
        assert not any(s in text for s in stop)


def test_near_miss_is_delivered_once_and_in_order() -> None:
    text, matched, _ = run(["Alice:"], ["Ali", "ce! Alice", " said Al", "ice", ": hi"])

    assert (text, matched) == ("Alice! Alice said ", "Alice:")


def test_included_stop_string_ends_the_text() -> None:
    text, matched, _ = run(["END"], ["one E", "ND two"], include_stop=True)

    assert (text, matched) == ("one END", "END")


def test_exempt_text_is_delivered_but_never_matched() -> None:
    matcher = StopStringMatcher(("ab",))

    first = matcher.feed("xa", is_exempt=True)
    second = matcher.feed("b", is_exempt=False)
    third = matcher.feed("ab")

    assert first == ("x", None)
    assert second == ("a", None)
    assert third == ("b", "ab")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStringMatcher(()).feed("abc") == ("abc", None)
