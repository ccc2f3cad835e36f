"""How many blocks a sequence needs, and how long a sequence a pool can hold."""

from __future__ import annotations

from llmserve.core import KVCacheSpec


def max_blocks_per_sequence(spec: KVCacheSpec, num_tokens: int, max_step_tokens: int) -> int:
    """Most blocks that a sequence of `num_tokens` tokens holds at any time, all groups together.

    While a step computes a chunk of up to `max_step_tokens` tokens, a group with a window holds
    the chunk and the window - 1 tokens before it; both may begin in the middle of a block.
    """
    whole = -(-num_tokens // spec.block_size)
    total = 0
    for group in spec.groups:
        if group.sliding_window is None:
            total += whole
        else:
            span = group.sliding_window - 1 + max_step_tokens
            total += min(whole, -(-(span - 1) // spec.block_size) + 1)
    return total


def max_tokens_that_fit(
    spec: KVCacheSpec, num_blocks: int, max_step_tokens: int, max_model_len: int
) -> int:
    """The longest sequence, up to `max_model_len`, that fits into the pool when it is alone.

    `num_blocks` counts the null block. 0 if not even one token fits.
    """
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if max_blocks_per_sequence(spec, middle, max_step_tokens) < num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
