"""Logits to tokens: grammars, masks, bias, penalties, the draw, and log-probabilities.

Owns the sampling state of every sequence that the runner holds, by request id; used by the runner
thread alone. A sequence's tokens follow from its logits, its parameters and its seed, whatever
else is in the batch: the n-th output token is drawn with the n-th number of the seed, so a
preempted sequence goes on where it was. Knows no models and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmserve.core import SamplingParams, SeqResult, TokenLogprobs
from llmserve.kernels import (
    SAMPLING_ROW,
    STATUS_INVALID,
    STATUS_OK,
    Kernels,
    PendingLogprobs,
    RowEdit,
    RowLogprobs,
    SampledRows,
    SampledTokens,
)
from llmserve.runner.masks import GrammarFailedError, GrammarFollower, MaskThread
from llmserve.runner.thinking import ThinkingFollower

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_INVALID = "the model's logits hold NaN or infinity"
_EMPTY = "no token is left to sample: every token of the vocabulary is masked"
_NO_GRAMMAR = "the grammar is too complex for the output to follow it any further; simplify it"
_NO_ALLOWED = (
    "no token is left to sample: the grammar allows none that allowed_token_ids, bad_words, "
    "logit_bias and min_tokens leave"
)
_FIRST_CAPACITY = 16


class Sampler:
    """Samples one token per row of logits.

    Invariant: every sequence has a slot of `_params` of its own. Its counter is written when it is
    sampled: the number of output tokens before that.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._sequences: dict[str, _Sequence] = {}
        self._params = np.zeros(_FIRST_CAPACITY, SAMPLING_ROW)
        self._free_slots = list(range(_FIRST_CAPACITY))
        self._mask_thread = MaskThread()

    def add(
        self,
        request_id: str,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """Takes a sequence on, in place of one of the same id. A resumed one brings its output."""
        self.remove(request_id)
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._params[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.top_k,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
            0,
        )
        sequence = _Sequence(slot, sampling, prompt_token_ids, output_token_ids)
        self._sequences[request_id] = sequence
        if sequence.grammar is not None:
            self._mask_thread.begin([sequence.grammar])

    def remove(self, request_id: str) -> None:
        """Forgets a sequence; one that is not known is no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.close()
            self._free_slots.append(sequence.slot)

    def sample(self, logits: torch.Tensor, request_ids: Sequence[str]) -> list[SeqResult]:
        """Draws the next token of each sequence and counts it as output.

        logits: float32 [num_rows, vocab_size], row i belongs to request_ids[i]; rows may be
        changed. A row with NaN or +inf, or without a token that may be sampled, or whose grammar
        has failed, gives a result with `error` and leaves its sequence as it was. Raises KeyError
        for an unknown id.
        """
        return self.collect(self.launch(logits, request_ids))

    def launch(self, logits: torch.Tensor, request_ids: Sequence[str]) -> Sampling:
        """The device's part of sample(); the tokens need not be known when it returns.

        Until collect(), sequences that depend on their output may not be sampled again.
        """
        sequences = [self._sequences[request_id] for request_id in request_ids]
        masks, failed = _grammar_masks(sequences)
        wanted = [i for i, s in enumerate(sequences) if s.sampling.num_logprobs is not None]
        is_changed = any(sequences[i].has_edits or sequences[i].grammar for i in wanted)
        raw = self._kernels.gather_rows(logits, np.asarray(wanted)) if is_changed else None
        edits = [s.edit(i) for i, s in enumerate(sequences) if s.has_edits and i not in failed]
        if edits:
            self._kernels.edit_logits(logits, edits)

        params = self._params[[s.slot for s in sequences]]
        params["counter"] = [s.num_output_tokens for s in sequences]
        sampled = self._kernels.sample_rows(logits, params, masks)
        for sequence in sequences:
            sequence.num_output_tokens += 1

        logprobs = None
        if wanted:
            rows = np.asarray(wanted, np.int32)
            logprobs = self._kernels.logprob_rows(
                logits if raw is None else raw,
                rows if raw is None else np.arange(len(wanted), dtype=np.int32),
                SampledTokens(sampled, rows),
                max(sequences[i].sampling.num_logprobs or 0 for i in wanted),
            )
        return Sampling(sequences, failed, sampled, wanted, logprobs)

    def collect(self, sampling: Sampling) -> list[SeqResult]:
        """The rest of sample(), once the device has done its part. May run in another thread."""
        sequences, failed = sampling.sequences, sampling.failed
        sampled = sampling.sampled.result()
        logprobs = _logprobs(sampling, sampled["token_id"])
        results = []
        for i, (token_id, status) in enumerate(
            zip(sampled["token_id"].tolist(), sampled["status"].tolist(), strict=True)
        ):
            sequence = sequences[i]
            if status == STATUS_OK and i not in failed:
                sequence.append(token_id)
                results.append(SeqResult((token_id,), logprobs.get(i, ())))
                continue
            sequence.num_output_tokens -= 1
            if i in failed:
                results.append(SeqResult(error=_NO_GRAMMAR, is_callers_fault=True))
            elif status != STATUS_INVALID and sequence.grammar is not None:
                results.append(SeqResult(error=_NO_ALLOWED, is_callers_fault=True))
            else:
                results.append(SeqResult(error=_INVALID if status == STATUS_INVALID else _EMPTY))
        self._mask_thread.begin(s.grammar for s in sequences if s.grammar is not None)
        return results

    def prompt_logprobs(
        self, logits: torch.Tensor, target_ids: Sequence[int], k: int
    ) -> PromptRows:
        """Log-probabilities of target_ids[i] and of the k best tokens in row i.

        logits: float32 [num_rows, vocab_size]. A row with NaN or +inf gives NaN.
        """
        row_ids = np.arange(len(target_ids), dtype=np.int32)
        token_ids = np.asarray(target_ids, np.int32)
        return PromptRows(token_ids, self._kernels.logprob_rows(logits, row_ids, token_ids, k))

    def _grow(self) -> None:
        size = len(self._params)
        self._params = np.concatenate([self._params, np.zeros(size, SAMPLING_ROW)])
        self._free_slots.extend(range(size, 2 * size))


@dataclass(frozen=True, slots=True)
class Sampling:
    """What Sampler.launch began: row i of the logits belongs to sequences[i]."""

    sequences: list[_Sequence]
    failed: set[int]  # rows whose grammar has failed
    sampled: SampledRows
    wanted: list[int]  # rows whose log-probabilities are in `logprobs`
    logprobs: PendingLogprobs | None


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Log-probabilities of prompt tokens that may not be known yet."""

    token_ids: npt.NDArray[np.int32]
    logprobs: PendingLogprobs

    def result(self) -> list[TokenLogprobs]:
        """May be called once the device has done its part."""
        return _token_logprobs(self.token_ids, self.logprobs.result())


class _Sequence:
    """A sequence's slot, its output so far, and what it does to a row of logits."""

    def __init__(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        self.slot = slot
        self.sampling = sampling
        self.output_token_ids = list(output_token_ids)
        self.num_output_tokens = len(output_token_ids)  # with those that are not known yet
        self._allowed_ids: Ids | None = None
        if sampling.allowed_token_ids is not None:
            self._allowed_ids = np.unique(_as_ids(sampling.allowed_token_ids))
        self._stop_ids = np.unique(_as_ids((*sampling.eos_token_ids, *sampling.stop_token_ids)))
        bias = dict(sampling.logit_bias)
        self._bias_ids = _as_ids(bias)
        self._bias = np.array([bias[id] for id in self._bias_ids.tolist()], np.float32)
        self._counts: _TokenCounts | None = None
        if sampling.has_penalties:
            is_repetition = sampling.repetition_penalty != 1.0
            self._counts = _TokenCounts(prompt_token_ids if is_repetition else (), output_token_ids)
        self._is_always_edited = bool(
            sampling.allowed_token_ids is not None
            or sampling.bad_words_token_ids
            or bias
            or sampling.has_penalties
            or sampling.thinking_budget is not None
        )
        self._thinking: ThinkingFollower | None = None
        if sampling.thinking_budget is not None:
            self._thinking = ThinkingFollower(sampling.thinking_budget, output_token_ids)
        self.grammar: GrammarFollower | None = None
        if sampling.grammar is not None:
            self.grammar = GrammarFollower(
                sampling.grammar,
                output_token_ids,
                _as_ids(sampling.eos_token_ids),
                ends_late=sampling.ignore_eos,
            )

    @property
    def has_edits(self) -> bool:
        return self._is_always_edited or self.num_output_tokens < self.sampling.min_tokens

    def edit(self, row: int) -> RowEdit:
        """Masks, bias and penalties. The grammar's mask comes when the row is sampled."""
        edit = RowEdit(
            row,
            allowed_ids=self._allowed_ids,
            banned_ids=self._banned_ids(),
            bias_ids=self._bias_ids,
            bias=self._bias,
        )
        if self._counts is not None:
            edit.penalty_ids, edit.penalty_counts = self._counts.counts()
            edit.repetition_penalty = self.sampling.repetition_penalty
            edit.frequency_penalty = self.sampling.frequency_penalty
            edit.presence_penalty = self.sampling.presence_penalty
        if self._thinking is not None:
            edit.forced_token_id = self._thinking.forced_token_id
        return edit

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        if self._thinking is not None:
            self._thinking.append(token_id)
        if self.grammar is not None and token_id not in self.sampling.eos_token_ids:
            self.grammar.append(token_id)

    def close(self) -> None:
        """The sequence is gone."""
        if self.grammar is not None:
            self.grammar.close()

    def _banned_ids(self) -> Ids:
        """Tokens that may not come next."""
        banned = [word[-1] for word in self.sampling.bad_words_token_ids if self._completes(word)]
        if self.num_output_tokens < self.sampling.min_tokens and not self._must_end:
            if not banned:
                return self._stop_ids
            banned += self._stop_ids.tolist()
        return np.unique(_as_ids(banned))

    @property
    def _must_end(self) -> bool:
        return self.grammar is not None and self.grammar.mask().is_at_end

    def _completes(self, word: tuple[int, ...]) -> bool:
        """Whether the output ends with all of a bad word but its last token."""
        prefix = list(word[:-1])
        return not prefix or self.output_token_ids[-len(prefix) :] == prefix


def _grammar_masks(
    sequences: Sequence[_Sequence],
) -> tuple[list[npt.NDArray[np.uint8] | None] | None, set[int]]:
    """What grammars allow in each row, as sample_rows takes it, and the rows whose have failed.

    Row i belongs to sequences[i].
    """
    masks: list[npt.NDArray[np.uint8] | None] = [None] * len(sequences)
    failed: set[int] = set()
    for i, sequence in enumerate(sequences):
        if sequence.grammar is None:
            continue
        try:
            masks[i] = sequence.grammar.mask().bits
        except GrammarFailedError as error:
            logger.warning("a grammar has failed: %s", error)
            failed.add(i)
    return (None if all(mask is None for mask in masks) else masks), failed


class _TokenCounts:
    """Tokens that penalties apply to, and how often each is in the output."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        known = np.unique(_as_ids(prompt_token_ids))
        self._size = len(known)
        self._ids = np.concatenate([known, np.zeros(_FIRST_CAPACITY, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places = {token_id: place for place, token_id in enumerate(known.tolist())}
        for token_id in output_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    def counts(self) -> tuple[Ids, Floats]:
        """The tokens, and how often each is in the output. Valid until the next add()."""
        return self._ids[: self._size], self._counts[: self._size]


def _as_ids(token_ids: Sequence[int] | dict[int, float]) -> Ids:
    """Token ids as an index, without negative ones, which would count from the end."""
    return np.fromiter((token_id for token_id in token_ids if token_id >= 0), np.int64)


def _logprobs(
    sampling: Sampling, token_ids: npt.NDArray[np.int32]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By row."""
    if sampling.logprobs is None:
        return {}
    rows = sampling.wanted
    ks = [sampling.sequences[i].sampling.num_logprobs or 0 for i in rows]
    entries = _token_logprobs(token_ids[rows], sampling.logprobs.result())
    return {
        i: (TokenLogprobs(e.token_id, e.logprob, e.rank, e.top_ids[:k], e.top_logprobs[:k]),)
        for i, e, k in zip(rows, entries, ks, strict=True)
    }


def _token_logprobs(token_ids: npt.NDArray[np.int32], values: RowLogprobs) -> list[TokenLogprobs]:
    columns = (token_ids, values.logprobs, values.ranks, values.top_ids, values.top_logprobs)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]
