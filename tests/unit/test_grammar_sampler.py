"""Sampler: sequences that follow grammars, alone and among others."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.core import SamplingParams
from llmserve.core.grammar import Grammar
from llmserve.grammar import GrammarKind, GrammarSpec
from llmserve.kernels import CPUKernels
from llmserve.runner.masks import GrammarFollower, Mask, MaskThread
from llmserve.runner.sampler import Sampler
from tests.grammar_builders import COMPILER, EOS_ID

VOCAB_SIZE = 300  # more than the tokenizer has
WORD = "[a-c]{2,4}(, [a-c]{2,4}){1,3}"


def grammar(regex: str = WORD) -> Grammar:
    return COMPILER.compile(GrammarSpec(GrammarKind.REGEX, regex))


def make_sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"grammar": grammar(), "eos_token_ids": (EOS_ID,)} | fields))


def make_logits(num_rows: int = 1, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 2


def generate(sampler: Sampler, request_id: str = "a", start: int = 0, num_tokens: int = 60) -> str:
    """Text up to the end of sequence, for logits that depend on the step alone."""
    text = ""
    for step in range(start, start + num_tokens):
        (result,) = sampler.sample(make_logits(seed=step), [request_id])
        assert result.error is None
        if result.token_ids[0] == EOS_ID:
            break
        text += chr(result.token_ids[0])
    return text


def write(sampling: SamplingParams, **options: Any) -> str:
    sampler = Sampler(CPUKernels())
    sampler.add("a", sampling, [1], [])
    return generate(sampler, **options)


def test_text_follows_the_grammar_at_any_temperature() -> None:
    for seed in range(20):
        for temperature in (0.0, 1.0, 2.0):
            text = write(make_sampling(seed=seed, temperature=temperature))
            assert re.fullmatch(WORD, text), text


def test_logits_beyond_the_mask_are_forbidden() -> None:
    logits = make_logits()
    logits[0, 290] = 50.0
    sampler = Sampler(CPUKernels())
    sampler.add("a", make_sampling(temperature=0.0), [1], [])

    (result,) = sampler.sample(logits, ["a"])

    assert result.token_ids[0] in b"abc"


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampler = Sampler(CPUKernels())
    sampler.add("a", make_sampling(num_logprobs=3), [1], [])
    logits = make_logits(seed=5)
    raw = logits[0].double().log_softmax(0)

    (result,) = sampler.sample(logits.clone(), ["a"])

    (row,) = result.logprobs
    assert row.logprob == pytest.approx(float(raw[row.token_id]), abs=1e-5)
    assert row.top_ids == tuple(raw.topk(3).indices.tolist())


def test_bias_and_allowed_tokens_choose_among_what_the_grammar_allows() -> None:
    assert write(make_sampling(grammar=grammar("[a-z]{5}"), logit_bias=((ord("q"), 100.0),))) == (
        "qqqqq"
    )
    allowed = (*b"xyz", EOS_ID)
    text = write(make_sampling(grammar=grammar("[a-z]{9}"), allowed_token_ids=allowed))
    assert set(text) <= set("xyz")


def test_resumed_sequence_goes_on_where_it_was() -> None:
    sampling = make_sampling(seed=3, temperature=1.5)
    whole = write(sampling)

    for cut in range(len(whole)):
        sampler = Sampler(CPUKernels())
        sampler.add("a", sampling, [1], list(whole[:cut].encode()))
        assert generate(sampler, start=cut) == whole[cut:]


def test_sequences_with_other_grammars_and_without_do_not_meet() -> None:
    regexes = [f"[{chr(97 + i)}x]{{3,6}}" for i in range(8)]
    alone = [write(make_sampling(grammar=grammar(r), seed=i)) for i, r in enumerate(regexes)]
    sampler = Sampler(CPUKernels())
    sampler.add("free", SamplingParams(temperature=0.0), [1], [])
    for i, regex in enumerate(regexes):
        sampler.add(str(i), make_sampling(grammar=grammar(regex), seed=i), [1], [])

    texts = [""] * 8
    running = set(range(8))
    for step in range(20):
        ids = ["free", *map(str, sorted(running))]
        logits = make_logits(seed=step).repeat(len(ids), 1)
        results = sampler.sample(logits, ids)
        assert results[0].token_ids == (int(make_logits(seed=step).argmax()),)
        for i, result in zip(sorted(running), results[1:], strict=True):
            if result.token_ids[0] == EOS_ID:
                running.discard(i)
                sampler.remove(str(i))
            else:
                texts[i] += chr(result.token_ids[0])

    assert texts == alone


def test_complete_text_ends_before_min_tokens() -> None:
    """Nothing else may come: the grammar is stronger than min_tokens."""
    assert write(make_sampling(grammar=grammar("ab"), min_tokens=10)) == "ab"


def test_min_tokens_lengthens_a_text_that_can_be_longer() -> None:
    for seed in range(5):
        text = write(make_sampling(grammar=grammar("[ab]{2,30}"), min_tokens=25, seed=seed))
        assert 25 <= len(text) <= 30


def test_ignore_eos_lengthens_a_text_as_far_as_the_grammar_goes() -> None:
    sampling = make_sampling(grammar=grammar("[ab]{2,30}"), ignore_eos=True)

    assert len(write(sampling)) == 30
    assert write(make_sampling(grammar=grammar("ab"), ignore_eos=True)) == "ab"


class _BrokenState:
    def __init__(self, num_good: int) -> None:
        self._num_good = num_good

    def mask(self) -> bytes:
        self._num_good -= 1
        if self._num_good < 0:
            raise RuntimeError("broken")
        return b"\xff" * 40

    def accept(self, token_id: int) -> None:
        """Anything goes."""


class _BrokenGrammar:
    def start(self) -> _BrokenState:
        return _BrokenState(2)


def test_grammar_that_fails_fails_its_sequence_only() -> None:
    sampler = Sampler(CPUKernels())
    sampler.add("good", make_sampling(), [1], [])
    sampler.add("broken", make_sampling(grammar=_BrokenGrammar()), [1], [])
    sampler.add("free", SamplingParams(), [1], [])

    errors = []
    for step in range(4):
        results = sampler.sample(make_logits(3, seed=step), ["good", "broken", "free"])
        errors.append([result.error is not None for result in results])

    assert errors == [[False] * 3, [False] * 3, [False, True, False], [False, True, False]]
    assert "grammar is too complex" in (results[1].error or "")
    assert results[1].is_callers_fault
    assert results[1].token_ids == ()


class _SlowState:
    def mask(self) -> bytes:
        begin = time.thread_time()
        while time.thread_time() < begin + 0.12:
            pass
        return b"\xff" * 40

    def accept(self, token_id: int) -> None:
        pass


class _SlowGrammar:
    def start(self) -> _SlowState:
        return _SlowState()


def test_grammar_whose_masks_are_slow_fails_its_sequence_only() -> None:
    sampler = Sampler(CPUKernels())
    sampler.add("slow", make_sampling(grammar=_SlowGrammar()), [1], [])
    sampler.add("good", make_sampling(), [1], [])

    errors = [
        [r.error is not None for r in sampler.sample(make_logits(2, seed=i), ["slow", "good"])]
        for i in range(3)
    ]

    assert errors == [[False, False], [True, False], [True, False]]


def test_grammar_and_bans_that_leave_no_token_are_the_callers_fault() -> None:
    sampler = Sampler(CPUKernels())
    sampler.add("a", make_sampling(allowed_token_ids=(EOS_ID,)), [1], [])

    (result,) = sampler.sample(make_logits(), ["a"])

    assert "allowed_token_ids" in (result.error or "")
    assert result.is_callers_fault


class _WatchedState:
    def __init__(self, threads: set[str], begun: threading.Event) -> None:
        self._threads = threads
        self._begun = begun

    def mask(self) -> bytes:
        self._threads.add(threading.current_thread().name)
        self._begun.set()
        return b"\xff" * 40

    def accept(self, token_id: int) -> None:
        self._threads.add(threading.current_thread().name)


class _WatchedGrammar:
    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.begun = threading.Event()

    def start(self) -> _WatchedState:
        return _WatchedState(self.threads, self.begun)


def test_masks_are_begun_before_they_are_needed_and_in_another_thread() -> None:
    watched = _WatchedGrammar()
    sampler = Sampler(CPUKernels())

    sampler.add("a", make_sampling(grammar=watched), [1], [])
    assert watched.begun.wait(30)
    for step in range(3):
        watched.begun.clear()
        sampler.sample(make_logits(seed=step), ["a"])
        assert watched.begun.wait(30), "the next mask was not begun after a token"

    assert watched.threads
    assert threading.current_thread().name not in watched.threads


def make_mask(allowed: set[int], *, ends_late: bool = False) -> Mask:
    """Of 320 tokens, 3 and 400 being ends."""
    bits = np.zeros(320, np.bool_)
    bits[list(allowed)] = True
    raw = np.packbits(bits, bitorder="little").tobytes()
    return Mask(raw, np.array([3, 400]), ends_late=ends_late)


def allowed_by(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.bits, bitorder="little")).tolist())


def test_mask_is_at_its_end_where_nothing_but_ends_may_come() -> None:
    assert make_mask(set()).is_at_end
    assert make_mask({3}).is_at_end
    assert not make_mask({2}).is_at_end
    assert not make_mask({3, 319}).is_at_end


def test_late_ends_are_allowed_where_nothing_else_is() -> None:
    assert allowed_by(make_mask({3, 7})) == {3, 7}
    assert allowed_by(make_mask({3, 7}, ends_late=True)) == {7}
    assert allowed_by(make_mask({3}, ends_late=True)) == {3}
    assert not make_mask({3, 7}, ends_late=True).is_at_end


def test_only_sequences_that_go_on_get_new_masks() -> None:
    """What has not gone on keeps its mask; what is closed needs none."""
    thread = MaskThread()
    grammars = [_WatchedGrammar() for _ in range(3)]
    followers = [GrammarFollower(one, [], np.array([EOS_ID]), ends_late=False) for one in grammars]
    thread.begin(followers)
    first = [follower.mask() for follower in followers]
    for watched in grammars:
        watched.begun.clear()

    followers[0].append(5)
    followers[1].append(5)
    followers[1].close()
    thread.begin(followers)

    assert followers[0].mask() is not first[0]
    assert followers[2].mask() is first[2]
    assert [watched.begun.is_set() for watched in grammars] == [True, False, False]
