"""Block hashes, and how much of a prompt a set of cached blocks is good for."""

from __future__ import annotations

import hashlib
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from llmserve.kvcache.prefix import BlockHash, extend_block_hashes, num_usable_blocks


def hashes_of(tokens: list[int], block_size: int = 2, salt: str | None = None) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, tokens, len(tokens) // block_size, block_size, salt)
    return hashes


def test_hash_is_blake2b_of_parent_and_token_ids() -> None:
    first = hashlib.blake2b(bytes(32) + array("i", [1, 2]).tobytes(), digest_size=32).digest()
    second = hashlib.blake2b(first + array("i", [3, 4]).tobytes(), digest_size=32).digest()

    assert hashes_of([1, 2, 3, 4, 5]) == [first, second]


def test_hash_of_a_block_covers_everything_before_it() -> None:
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([9, 2, 3, 4])[1]
    assert hashes_of([1, 2, 3, 4])[0] == hashes_of([1, 2, 9, 9])[0]


def test_hash_depends_on_where_blocks_end() -> None:
    assert hashes_of([1, 2, 3, 4], 4)[0] != hashes_of([1, 2, 3, 4], 2)[1]


def test_different_salts_share_no_hash() -> None:
    tokens = [1, 2, 3, 4]
    variants = [hashes_of(tokens, salt=salt) for salt in (None, "", "a", "b")]

    assert len({digest for hashes in variants for digest in hashes}) == 8


def test_a_salt_is_not_a_beginning_of_the_tokens() -> None:
    assert hashes_of([1, 2], salt="\x01\0\0\0\x02\0\0\0") != hashes_of([1, 2, 1, 2])[1:]


def test_any_text_is_a_salt() -> None:
    assert len(hashes_of([1, 2], salt="\ud800 grüße \U0001f600")[0]) == 32


def test_hashes_are_the_same_when_computed_piece_by_piece() -> None:
    tokens = list(range(1000, 1012))
    hashes: list[BlockHash] = []
    for num_blocks in (1, 1, 3, 2, 6):
        extend_block_hashes(hashes, tokens, num_blocks, 2, "salt")

    assert hashes == hashes_of(tokens, salt="salt")


@pytest.mark.parametrize(
    ("cached", "needed", "usable"),
    [
        ([[1, 2, 3]], [None], 3),
        ([[1, 0, 3]], [None], 1),
        ([[0, 2, 3]], [2], 3),  # the window needs the last two only
        ([[0, 2, 0]], [2], 0),
        ([[1, 0, 3]], [2], 1),  # at the beginning there are fewer than the window wants
        ([[1, 2, 3, 4], [1, 0, 3, 0]], [None, 1], 3),
        ([[1, 2, 0, 4], [0, 0, 3, 4]], [None, 1], 0),
        ([[0, 0]], [0], 2),  # a window of one token needs nothing before it
        ([[], []], [None, 3], 0),
    ],
)
def test_usable_blocks(cached: list[list[int]], needed: list[int | None], usable: int) -> None:
    assert num_usable_blocks(cached, needed) == usable


@given(st.data())
def test_usable_blocks_is_the_largest_length_that_every_group_can_go_on_from(
    data: st.DataObject,
) -> None:
    length = data.draw(st.integers(0, 6))
    needed = data.draw(st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=3))
    row = st.lists(st.sampled_from([0, 1, 1, 1]), min_size=length, max_size=length)
    cached = [data.draw(row) for _ in needed]

    def is_usable(k: int) -> bool:
        spans = [
            blocks[0 if need is None else max(0, k - need) : k]
            for blocks, need in zip(cached, needed, strict=True)
        ]
        return all(all(span) for span in spans)

    expected = max(k for k in range(length + 1) if is_usable(k))
    assert num_usable_blocks(cached, needed) == expected
