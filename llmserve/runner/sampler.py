"""Logits to tokens: grammars, masks, bias, penalties, the draw, and log-probabilities.

Owns the sampling state of every sequence that the runner holds, by request id; used by the runner
thread alone. A sequence's tokens follow from its logits, its parameters and its seed, whatever
else is in the batch: the n-th output token is drawn with the n-th number of the seed, so a
preempted sequence goes on where it was. Knows no models and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from llmserve.core import SamplingParams, SeqResult, TokenLogprobs
from llmserve.kernels import SAMPLING_ROW, STATUS_INVALID, STATUS_OK, Kernels
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

    Invariants: every sequence has a slot of `_params` of its own; `_params["counter"][slot]` is
    the number of its output tokens.
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
            len(output_token_ids),
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
        sequences = [self._sequences[request_id] for request_id in request_ids]
        wanted = [i for i, s in enumerate(sequences) if s.sampling.num_logprobs is not None]
        raw_rows = [i for i in wanted if sequences[i].has_edits or sequences[i].grammar is not None]
        raw = logits[raw_rows] if raw_rows else None
        masks, failed = _grammar_masks(sequences)
        for i, sequence in enumerate(sequences):
            if sequence.has_edits and i not in failed:
                sequence.edit(logits[i].numpy())

        slots = np.fromiter((s.slot for s in sequences), np.intp, len(sequences))
        sampled = self._kernels.sample_rows(logits, self._params[slots], masks)
        is_ok = sampled["status"] == STATUS_OK
        is_ok[list(failed)] = False
        self._params["counter"][slots[is_ok]] += np.uint64(1)

        if raw is not None:
            logits[raw_rows] = raw
        token_ids = sampled["token_id"]
        logprobs = self._logprobs(logits, token_ids, sequences, [i for i in wanted if is_ok[i]])
        results = []
        for i, (token_id, status) in enumerate(
            zip(token_ids.tolist(), sampled["status"].tolist(), strict=True)
        ):
            if i in failed:
                results.append(SeqResult(error=_NO_GRAMMAR, is_callers_fault=True))
                continue
            has_grammar = sequences[i].grammar is not None
            if status not in (STATUS_OK, STATUS_INVALID) and has_grammar:
                results.append(SeqResult(error=_NO_ALLOWED, is_callers_fault=True))
                continue
            if status != STATUS_OK:
                results.append(SeqResult(error=_INVALID if status == STATUS_INVALID else _EMPTY))
                continue
            sequences[i].append(token_id)
            results.append(SeqResult((token_id,), logprobs.get(i, ())))
        self._mask_thread.begin(s.grammar for s in sequences if s.grammar is not None)
        return results

    def prompt_logprobs(
        self, logits: torch.Tensor, target_ids: Sequence[int], k: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of target_ids[i] and of the k best tokens in row i.

        logits: float32 [num_rows, vocab_size]. A row with NaN or +inf gives NaN.
        """
        row_ids = np.arange(len(target_ids), dtype=np.int32)
        return _token_logprobs(self._kernels, logits, row_ids, np.asarray(target_ids, np.int32), k)

    def _logprobs(
        self,
        logits: torch.Tensor,
        token_ids: npt.NDArray[np.int32],
        sequences: list[_Sequence],
        rows: list[int],
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        if not rows:
            return {}
        ks = [sequences[i].sampling.num_logprobs or 0 for i in rows]
        row_ids = np.asarray(rows, np.int32)
        entries = _token_logprobs(self._kernels, logits, row_ids, token_ids[row_ids], max(ks))
        return {
            i: (TokenLogprobs(e.token_id, e.logprob, e.rank, e.top_ids[:k], e.top_logprobs[:k]),)
            for i, e, k in zip(rows, entries, ks, strict=True)
        }

    def _grow(self) -> None:
        size = len(self._params)
        self._params = np.concatenate([self._params, np.zeros(size, SAMPLING_ROW)])
        self._free_slots.extend(range(size, 2 * size))


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
        self._allowed_ids = _as_ids(sampling.allowed_token_ids or ())
        self._stop_ids = _as_ids((*sampling.eos_token_ids, *sampling.stop_token_ids))
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
        return self._is_always_edited or len(self.output_token_ids) < self.sampling.min_tokens

    def edit(self, row: Floats) -> None:
        """Applies masks, bias and penalties to logits [vocab_size], in vLLM's order.

        The grammar's mask comes when the row is sampled.
        """
        self._mask(row)
        if len(self._bias_ids):
            is_inside = self._bias_ids < len(row)
            row[self._bias_ids[is_inside]] += self._bias[is_inside]
        if self._counts is not None:
            self._counts.penalize(row, self.sampling)
        if self._thinking is not None and self._thinking.forced_token_id is not None:
            row.fill(-np.inf)
            row[self._thinking.forced_token_id] = 0.0

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

    def _mask(self, row: Floats) -> None:
        """Sets the logits of tokens that may not come next to -inf."""
        if self.sampling.allowed_token_ids is not None:
            allowed = self._allowed_ids[self._allowed_ids < len(row)]
            logits = row[allowed]
            row.fill(-np.inf)
            row[allowed] = logits
        banned = [word[-1] for word in self.sampling.bad_words_token_ids if self._completes(word)]
        if banned:
            ids = _as_ids(banned)
            row[ids[ids < len(row)]] = -np.inf
        if len(self.output_token_ids) < self.sampling.min_tokens and not self._must_end:
            row[self._stop_ids[self._stop_ids < len(row)]] = -np.inf

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

    def penalize(self, row: Floats, sampling: SamplingParams) -> None:
        """Lowers the logits of known tokens in row [vocab_size].

        Repetition (Keskar et al., CTRL, 2019, arXiv 1909.05858) divides positive logits and
        multiplies negative ones; frequency is subtracted per occurrence in the output, presence
        once for a token that occurs there.
        """
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        is_inside = ids < len(row)
        ids, counts = ids[is_inside], counts[is_inside]
        logits = row[ids]
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            logits = np.where(logits > 0, logits / penalty, logits * penalty)
        logits -= np.float32(sampling.frequency_penalty) * counts
        logits -= np.float32(sampling.presence_penalty) * (counts > 0)
        row[ids] = logits


def _as_ids(token_ids: Sequence[int] | dict[int, float]) -> Ids:
    """Token ids as an index, without negative ones, which would count from the end."""
    return np.fromiter((token_id for token_id in token_ids if token_id >= 0), np.int64)


def _token_logprobs(
    kernels: Kernels,
    logits: torch.Tensor,
    row_ids: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    k: int,
) -> list[TokenLogprobs]:
    values = kernels.logprob_rows(logits, row_ids, token_ids, k)
    columns = (token_ids, values.logprobs, values.ranks, values.top_ids, values.top_logprobs)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]
