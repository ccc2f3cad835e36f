"""Prefix caching without blocks: what a full block is called, and how much of a prompt is usable.

A block's hash covers its tokens and, through its parent's hash, all tokens before it, so equal
hashes mean equal beginnings. Hashes are 32 bytes of BLAKE2b (RFC 7693): nobody can construct a
prompt whose hash collides with another user's.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

BLOCK_HASH_BYTES = 32


def root_hash(cache_salt: str | None) -> BlockHash:
    """What stands for the parent of a first block. Different salts share no block."""
    if cache_salt is None:
        return BlockHash(bytes(BLOCK_HASH_BYTES))
    data = cache_salt.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=BLOCK_HASH_BYTES, person=b"cache_salt")
    return BlockHash(digest.digest())


def extend_block_hashes(
    hashes: list[BlockHash],
    token_ids: list[int],
    num_blocks: int,
    block_size: int,
    cache_salt: str | None,
) -> None:
    """Appends hashes until there is one for each of the first `num_blocks` full blocks."""
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    data = array("i", token_ids[start * block_size : num_blocks * block_size]).tobytes()
    num_bytes = len(data) // (num_blocks - start)
    for offset in range(0, len(data), num_bytes):
        content = parent + data[offset : offset + num_bytes]
        digest = hashlib.blake2b(content, digest_size=BLOCK_HASH_BYTES).digest()
        parent = BlockHash(digest)
        hashes.append(parent)


def num_usable_blocks(cached: list[list[int]], num_needed: list[int | None]) -> int:
    """The largest k such that every group can go on after its first k blocks.

    `cached[group]` lists a group's cached blocks, 0 where there is none. A group without window
    (`num_needed[group]` None) must have all k blocks, one with a window the last
    `num_needed[group]` of them.
    """
    usable = min(len(blocks) for blocks in cached)
    for blocks, needed in zip(cached, num_needed, strict=True):
        if needed is None and 0 in blocks[:usable]:
            usable = blocks.index(0)
    # Shorten until no window has a hole; where there is one, only what ends before it can do.
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for blocks, needed in zip(cached, num_needed, strict=True):
            start = 0 if needed is None else max(0, usable - needed)
            window = blocks[start:usable]
            if needed is not None and 0 in window:
                usable -= window[::-1].index(0) + 1
                is_shorter = True
    return usable
