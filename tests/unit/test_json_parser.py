"""JSON bodies: the same values by both parsers, limits, and time for other threads."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.api.json_parser import MAX_CONTAINERS, MAX_VALUES, _parse_yielding, parse_json
from llmserve.errors import RequestError
from tests.pauses import pauses_during, scaled

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_both_parsers_give_what_the_standard_library_gives(value: object) -> None:
    body = json.dumps(value).encode()

    assert parse_json(body) == value
    assert _parse_yielding(body) == value


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"a": 1} x', b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\xff"}', b"[1,]"],
)
@pytest.mark.parametrize("parse", [parse_json, _parse_yielding])
def test_what_is_not_json_is_refused(body: bytes, parse: Callable[[bytes], object]) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse(body)


def test_deep_nesting_is_refused_by_both_parsers() -> None:
    body = b"[" * 10_000 + b"]" * 10_000

    for parse in (parse_json, _parse_yielding):
        with pytest.raises(RequestError, match="not valid JSON"):
            parse(body)


def test_commas_and_braces_within_strings_do_not_count() -> None:
    text = 'say \\"{[,\\\\' * MAX_CONTAINERS
    body = f'{{"prompt": "{text}", "n": 1}}'.encode()

    parsed = parse_json(body)

    assert parsed == {"prompt": json.loads(f'"{text}"'), "n": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": [' + b"1," * MAX_VALUES + b"1, 1]}", 413),
        (b'{"prompt": [' + b"[]," * MAX_CONTAINERS + b"[]]}", 400),
        (b'{"prompt": ["\\"", ' + b"{}," * MAX_CONTAINERS + b"{}]}", 400),
    ],
    ids=["values", "lists", "objects"],
)
def test_too_many_values_are_refused(body: bytes, status: int) -> None:
    with pytest.raises(RequestError, match="more than") as caught:
        parse_json(body)

    assert caught.value.status == status


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"12345," * 900_000 + b"1]}",
        b'{"prompt": [' + b'{"a":1},' * 45_000 + b"1]}",
        b'{"prompt": "' + b"hello, world [" * 700_000 + b'"}',
    ],
    ids=["many numbers", "many objects", "a long text"],
)
def test_other_threads_run_while_a_large_body_is_parsed(body: bytes) -> None:
    longest = min(max(pauses_during(lambda: parse_json(body))) for _ in range(3))

    assert longest < scaled(0.040)  # the aim is 0.020
