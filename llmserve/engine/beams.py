"""Runs a beam search on the engine: every beam's next token is a request of one token.

The prefix cache keeps the beams' common beginnings, so a step computes little more than the new
tokens. Owns nothing; whoever cancels it frees the steps in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from llmserve.core import (
    BeamParams,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    PromptLogprobs,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from llmserve.engine.beam_search import Beam, BeamSearch
from llmserve.engine.outputs import ChoiceState
from llmserve.errors import EngineDrainingError, EngineError
from llmserve.tokenizer import Tokenizer

# Candidates that are ranked on the event loop; ranking more takes milliseconds.
_INLINE_CANDIDATES = 4000
_TOKENS_PER_CHARACTER = 4  # at most, as a character has at most four bytes


class DeltaStream(Protocol):
    """What the engine gives for a request."""

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...

    def abort(self) -> None: ...


async def search_beams(
    request: GenerationRequest,
    beam: BeamParams,
    generate: Callable[[GenerationRequest], DeltaStream],
    tokenizer: Tokenizer,
) -> list[OutputDelta]:
    """One whole delta per beam, best first. Raises EngineError."""
    sampling = request.sampling
    finder = _StopFinder(request, tokenizer)
    search = BeamSearch(beam.width, beam.length_penalty, sampling, finder.is_at_end)
    num_candidates = beam.width * search.num_logprobs
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens = 0
    num_steps = 0
    while not search.is_over:
        deltas = await _step(request, search, num_steps, generate)
        if num_steps == 0:
            prompt_logprobs = deltas[0].prompt_logprobs
            num_cached_tokens = deltas[0].num_cached_tokens
        num_steps += 1
        rows = [delta.logprobs[0] for delta in deltas]
        if num_candidates <= _INLINE_CANDIDATES:
            search.advance(rows)
        else:
            await asyncio.to_thread(search.advance, rows)
    if len(search.finished) < beam.width:
        raise EngineError(f"the beam search found {len(search.finished)} of {beam.width} beams")
    outputs = await asyncio.to_thread(_make_deltas, request, search.finished, tokenizer)
    for delta in outputs:
        delta.num_cached_tokens = num_cached_tokens
    outputs[0].prompt_logprobs = prompt_logprobs
    return outputs


async def _step(
    request: GenerationRequest,
    search: BeamSearch,
    num_steps: int,
    generate: Callable[[GenerationRequest], DeltaStream],
) -> list[OutputDelta]:
    """The next token of every running beam, and the likeliest others beside it."""
    num_logprobs = max(search.num_logprobs, request.sampling.num_logprobs or 0)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=request.sampling.num_prompt_logprobs if num_steps == 0 else None,
    )
    streams: list[DeltaStream] = []
    try:
        for number, beam in enumerate(search.running):
            streams.append(
                generate(
                    GenerationRequest(
                        request_id=f"{request.request_id}-step{num_steps}-{number}",
                        prompt_token_ids=[*request.prompt_token_ids, *beam.token_ids],
                        sampling=sampling,
                        priority=request.priority,
                        cache_salt=request.cache_salt,
                        is_logged=False,
                    )
                )
            )
        return [await _only_delta(stream) for stream in streams]
    finally:
        for stream in streams:
            stream.abort()


async def _only_delta(stream: DeltaStream) -> OutputDelta:
    async for delta in stream:
        if delta.logprobs:
            return delta
    raise EngineDrainingError("the server is shutting down")


class _StopFinder:
    """Whether the last token of an output completed a stop string."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        longest = max((len(stop) for stop in request.sampling.stop), default=0)
        self._num_tokens = _TOKENS_PER_CHARACTER * (longest + 1)

    def is_at_end(self, token_ids: tuple[int, ...]) -> bool:
        """Given that no earlier token did. Decodes as many tokens as a stop string may have."""
        sampling = self._request.sampling
        if not sampling.stop:
            return False
        start = max(sampling.min_tokens, len(token_ids) - self._num_tokens)
        before = [*self._request.prompt_token_ids[-self._num_tokens :], *token_ids[:start]]
        decoder = self._tokenizer.stream_decoder(
            before,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        text = "".join(decoder.step(token_id) for token_id in token_ids[start:])
        return any(stop in text for stop in sampling.stop)


def _make_deltas(
    request: GenerationRequest, beams: list[Beam], tokenizer: Tokenizer
) -> list[OutputDelta]:
    return [_make_delta(request, index, beam, tokenizer) for index, beam in enumerate(beams)]


def _make_delta(
    request: GenerationRequest, index: int, beam: Beam, tokenizer: Tokenizer
) -> OutputDelta:
    """Text, end and log-probabilities of a beam, as if it had been generated alone."""
    sampling = request.sampling
    sequence = Request(request.request_id, request.prompt_token_ids, sampling, arrival_time=0.0)
    last = beam.token_ids[-1]
    is_eos = last in sampling.eos_token_ids
    is_stop_id = last in sampling.stop_token_ids and not is_eos
    event = TokenEvent(
        request.request_id,
        beam.token_ids,
        logprobs=_cut_rows(beam, sampling.num_logprobs),
        finish_reason=FinishReason.STOP if is_eos or is_stop_id else FinishReason.LENGTH,
        stop_reason=last if is_stop_id else None,
    )
    return ChoiceState.create(index, sequence, tokenizer).process(event)


def _cut_rows(beam: Beam, num_logprobs: int | None) -> tuple[TokenLogprobs, ...]:
    """The rows with as many alternatives as the request asked for."""
    if num_logprobs is None:
        return ()
    return tuple(
        TokenLogprobs(
            row.token_id,
            row.logprob,
            row.rank,
            row.top_ids[:num_logprobs],
            row.top_logprobs[:num_logprobs],
        )
        for row in beam.rows
    )
