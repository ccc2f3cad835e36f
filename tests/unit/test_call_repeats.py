"""Forced calls: the first repeated one ends the output and is left out."""

from __future__ import annotations

import pytest

from llmserve.api.call_repeats import CallHistory
from llmserve.tool_parsers import CallDelta


def pieces(calls: list[tuple[str, str]], size: int) -> list[CallDelta]:
    """The calls in pieces of `size` characters of arguments."""
    deltas = []
    for index, (name, arguments) in enumerate(calls):
        parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        deltas.append(CallDelta(index, f"id{index}", name, parts[0]))
        deltas += [CallDelta(index, arguments=part) for part in parts[1:]]
    return deltas


def joined(deltas: list[CallDelta]) -> list[tuple[str, str]]:
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        name, arguments = calls.get(delta.index, (delta.name or "", ""))
        calls[delta.index] = (name, arguments + delta.arguments)
    return list(calls.values())


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([("f", '{"a":1}'), ("f", '{"a":1}')], 1),
        ([("f", '{"a":1}'), ("g", '{"a":1}')], 2),
        ([("f", '{"a":1}'), ("f", '{"a":2}')], 2),
        ([("f", '{"a":1}'), ("f", '{"a":2}'), ("f", '{"a":1}')], 2),
        ([("f", '{"a":1}'), ("f", '{"a"')], 2),
        ([("f", '{"a":1}')], 1),
    ],
)
def test_repeated_call_is_left_out(calls: list[tuple[str, str]], kept: int, size: int) -> None:
    history = CallHistory()

    released = [d for delta in pieces(calls, size) for d in history.add([delta])]
    released += history.release()

    assert joined(released) == calls[:kept]
    assert history.has_repeat == (kept < len(calls))


def test_call_that_cannot_be_a_repeat_is_not_held_back() -> None:
    history = CallHistory()

    first = history.add([CallDelta(0, "a", "f", '{"a":')])
    history.add([CallDelta(0, arguments="1}")])
    held = history.add([CallDelta(1, "b", "f", '{"a":')])
    released = history.add([CallDelta(1, arguments="2")])

    assert joined(first) == [("f", '{"a":')]
    assert held == []
    assert joined(released) == [("f", '{"a":2')]
