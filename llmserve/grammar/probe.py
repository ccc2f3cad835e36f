"""Tries a compiled grammar out: some compile, and fail or are slow once a text begins."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from llmserve.grammar.spec import GrammarError
from llmserve.grammar.state import NO_TEXT, describe
from llmserve.grammar.vocabulary import Vocabulary

_NUM_TOKENS = 24
# The first masks are slower than those of the same states later.
_MAX_MASK_S = 0.1
_MAX_SLOW_MASKS = 2


def probe(matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Follows the grammar along one text of chance, the same each time; `matcher` stays put.

    Raises GrammarError for a grammar without texts and for one that is too complex.
    """
    if matcher.is_error():
        raise GrammarError(describe(matcher.get_error()))
    if not any(matcher.compute_bitmask()) and not matcher.is_error():
        raise GrammarError(NO_TEXT)
    walk = matcher.deep_copy()
    draw = random.Random(0)
    num_slow = 0
    for _ in range(_NUM_TOKENS):
        begin = time.thread_time()
        mask = np.frombuffer(walk.compute_bitmask(), np.uint8)
        num_slow += time.thread_time() - begin > _MAX_MASK_S
        if num_slow > _MAX_SLOW_MASKS:
            raise GrammarError("the grammar is too complex: finding what may come next is slow")
        _check(walk)
        token_id = _draw(mask, draw, vocabulary.eos_token_ids)
        if token_id is None:
            return
        walk.consume_token(token_id)
        _check(walk)


def _draw(
    mask: npt.NDArray[np.uint8], draw: random.Random, eos_token_ids: Sequence[int]
) -> int | None:
    """A token of the mask that is no end; None if there is none."""
    allowed = mask.copy()
    for token_id in eos_token_ids:
        allowed[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    places = np.flatnonzero(allowed)
    if not len(places):
        return None
    place = int(places[draw.randrange(len(places))])
    return 8 * place + draw.choice([bit for bit in range(8) if allowed[place] >> bit & 1])


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = describe(matcher.get_error())
        if reason != NO_TEXT:
            reason = f"the grammar is too complex, outputs could not follow it: {reason}"
        raise GrammarError(reason)
