"""POST /v1/completions: prompts in, their continuations out, at once or as a stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from aiohttp import web

from llmserve.api.body import parse_object, read_body, run_sized
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.fields import refuse, validate
from llmserve.api.infilling import infill_prompt, infill_tokens
from llmserve.api.logprobs import CompletionLogprobs, prompt_logprobs, prompt_token_texts
from llmserve.api.middleware import REQUEST_ID
from llmserve.api.preparation import Prepared, make_generations, note_ignored, token_names
from llmserve.api.prompts import (
    Prompt,
    encode_prompt,
    run_preparation,
    split_prompts,
    truncate,
)
from llmserve.api.sampling import check_stream_fields, make_sampling_params, resolve_logprobs
from llmserve.api.schemas import CompletionRequest
from llmserve.api.sse import Event, respond_with_events
from llmserve.api.streams import Streams
from llmserve.api.structured import requested_grammar
from llmserve.core import OutputDelta, PromptLogprobs
from llmserve.errors import RequestError

_DEFAULT_MAX_TOKENS = 16

_Prepared = Prepared[CompletionRequest]


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    request_id = request[REQUEST_ID]
    prepared = await run_preparation(
        context,
        len(body),
        lambda context: prepare_completion(body, context, request_id),
    )
    streams = Streams(context.engine, prepared.generations)
    try:
        if prepared.request.stream:
            return await respond_with_events(
                request,
                _stream(prepared, streams, context),
                request_id=request_id,
                ping_interval_s=context.config.sse_ping_interval,
                headers=prepared.headers,
            )
        collected: list[list[OutputDelta]] = [[] for _ in prepared.prompts]
        async for batch in streams.batches():
            for position, delta in batch:
                collected[position].append(delta)
        size = _answer_size(prepared, collected)
        answer = await run_sized(size, _make_answer, prepared, collected, context)
        return web.Response(body=answer, content_type="application/json", headers=prepared.headers)
    finally:
        streams.abort()


def prepare_completion(body: bytes, context: ApiContext, request_id: str) -> _Prepared:
    """From bytes to what the engine shall do. Raises RequestError."""
    fields = parse_object(body)
    request = resolve_logprobs(validate(CompletionRequest, fields), context)
    model = context.resolve_model(request.model)
    ignored = note_ignored(request, fields, context)
    _check_combinations(request)
    check_stream_fields(request)
    named = split_prompts(request.prompt)
    prompts = [_encode(value, name, request, context) for name, value in named.items()]
    wanted = [request.prompt_logprobs, request.logprobs if request.echo else None]
    counts = [count for count in wanted if count is not None]
    sampling = make_sampling_params(
        request,
        context,
        # The best of more candidates than asked for are chosen by their log-probabilities.
        num_logprobs=0 if request.logprobs is None and _has_spare(request) else request.logprobs,
        num_prompt_logprobs=max(counts) if counts else None,
        grammar=requested_grammar(request, context),
    )
    if request.suffix:
        tokens = infill_tokens(context.tokenizer)
        prompts = [infill_prompt(p, request.suffix, tokens, context.tokenizer) for p in prompts]
        if not request.ignore_eos:
            ends = (*sampling.eos_token_ids, *tokens.ends)
            sampling = dataclasses.replace(sampling, eos_token_ids=ends)
    response_id = f"cmpl-{request.request_id or request_id}"
    generations = make_generations(
        request,
        prompts,
        sampling,
        context,
        response_id=response_id,
        # Reading the prompt's log-probabilities takes a step, and a step samples a token.
        asked_max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        best_of=request.best_of,
    )
    if request.max_tokens == 0 and not counts:
        generations = []
    return Prepared(
        request=request,
        prompts=prompts,
        generations=generations,
        response_id=response_id,
        model=model,
        names=token_names(request, context),
        ignored=ignored,
    )


def _encode(
    value: str | list[int], name: str, request: CompletionRequest, context: ApiContext
) -> Prompt:
    prompt = encode_prompt(
        value,
        context,
        name=name,
        add_special_tokens=request.add_special_tokens,
        is_bounded=request.truncate_prompt_tokens is None,
    )
    return truncate(prompt, request, context.engine.max_model_len, request.max_tokens)


def _has_spare(request: CompletionRequest) -> bool:
    """Whether more candidates are generated than the answer has."""
    return request.best_of is not None and request.best_of > request.n


def _check_combinations(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise RequestError(
            "max_tokens is 0; it must be at least 1, except with echo", param="max_tokens"
        )
    if request.best_of is not None and request.best_of < request.n:
        refuse("best_of", request.best_of, f"at least n, which is {request.n}")
    if _has_spare(request) and request.stream:
        raise RequestError(
            f"best_of is {request.best_of}; with stream it must be n, which is {request.n}, as "
            "the best are known at the end only",
            param="best_of",
        )
    if not request.suffix:
        return
    if request.echo and request.logprobs is not None:
        raise RequestError("suffix does not go with echo and logprobs", param="suffix")
    if request.truncate_prompt_tokens is not None:
        raise RequestError(
            "truncate_prompt_tokens does not go with suffix", param="truncate_prompt_tokens"
        )


class _Choice:
    """One choice of the answer. What `add` takes in, `take` gives out once, as JSON."""

    def __init__(self, index: int, prompt: Prompt, prepared: _Prepared) -> None:
        self.index = index
        self._prompt = prompt
        self._request = prepared.request
        self._names = prepared.names
        self._logprobs = CompletionLogprobs(prepared.names)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._has_prompt_ids = prepared.request.return_token_ids

    @property
    def has_news(self) -> bool:
        return self._finish_reason is not None or any(self._texts)

    def echo(self, rows: PromptLogprobs | None, context: ApiContext) -> None:
        """Puts the prompt before the output, with its log-probabilities if they are asked for."""
        prompt = self._prompt
        skip_special_tokens = self._request.skip_special_tokens
        text = prompt.text
        if text is None:
            text = context.tokenizer.decode(
                prompt.token_ids, skip_special_tokens=skip_special_tokens
            )
        self._texts.append(text)
        if rows is None:
            return
        texts = prompt_token_texts(
            prompt.token_ids,
            prompt.text,
            context.tokenizer,
            skip_special_tokens=skip_special_tokens,
        )
        limit = self._request.logprobs or 0
        for token_id, token_text, row in zip(prompt.token_ids, texts, rows, strict=True):
            self._logprobs.add(token_id, token_text, row, limit=limit)

    def add(self, delta: OutputDelta) -> None:
        if self._request.max_tokens != 0:
            self._texts.append(delta.text)
            self._token_ids += delta.token_ids
            if self._request.logprobs is not None:
                self._logprobs.add_delta(delta)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason.value
            self._stop_reason = delta.stop_reason

    def finish_without_output(self) -> None:
        """The request asked for no tokens."""
        self._finish_reason, self._stop_reason = "length", None

    def take(self) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self.index,
            "text": "".join(self._texts),
            "logprobs": self._logprobs.take(),
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._has_prompt_ids:
            choice["prompt_token_ids"] = self._prompt.token_ids
            self._has_prompt_ids = False
        if self._request.return_token_ids:
            choice["token_ids"] = self._token_ids
        self._texts, self._token_ids = [], []
        return choice


def _make_answer(
    prepared: _Prepared, collected: list[list[OutputDelta]], context: ApiContext
) -> bytes:
    """The answer to an unstreamed request, as JSON.

    Each choice is encoded by itself: the encoder stops all threads while it works.
    """
    request, usage = prepared.request, prepared.usage_counter()
    choices: list[bytes] = []
    for position, (prompt, deltas) in enumerate(zip(prepared.prompts, collected, strict=True)):
        rows = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
        for delta in deltas:
            usage.add(position, delta)
        for place, candidate in enumerate(_select(deltas, request)):
            choice = _Choice(position * request.n + place, prompt, prepared)
            if request.echo:
                choice.echo(rows if request.logprobs is not None else None, context)
            for delta in candidate:
                choice.add(delta)
            if request.max_tokens == 0:
                choice.finish_without_output()
            taken = choice.take()
            if request.prompt_logprobs is not None:
                taken["prompt_logprobs"] = prompt_logprobs(
                    rows or [], prepared.names, limit=request.prompt_logprobs
                )
            choices.append(orjson.dumps(taken))
    if request.max_tokens == 0:
        usage.clear_output()
    start = orjson.dumps(prepared.envelope("text_completion"))[:-1]
    end = orjson.dumps(usage.as_json())
    return b"".join([start, b',"choices":[', b",".join(choices), b'],"usage":', end, b"}"])


def _select(deltas: list[OutputDelta], request: CompletionRequest) -> list[list[OutputDelta]]:
    """The deltas of each of the prompt's n choices; of more candidates, the best ones.

    Beams come best first. Other candidates are ranked by the mean log-probability of their
    tokens, equal ones by their order.
    """
    candidates: list[list[OutputDelta]] = [[] for _ in range(request.best_of or request.n)]
    for delta in deltas:
        candidates[delta.index].append(delta)
    if _has_spare(request) and not request.use_beam_search:
        candidates.sort(key=_mean_logprob, reverse=True)
    return candidates[: request.n]


def _mean_logprob(deltas: list[OutputDelta]) -> float:
    logprobs = [row.logprob for delta in deltas for row in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _answer_size(prepared: _Prepared, collected: list[list[OutputDelta]]) -> int:
    """Roughly the bytes that building the answer goes through."""
    request = prepared.request
    num_rows = sum(len(delta.token_ids) for deltas in collected for delta in deltas)
    per_row = 8
    if request.logprobs is not None or request.prompt_logprobs is not None:
        per_row = 64 * (1 + max(request.logprobs or 0, request.prompt_logprobs or 0))
    if request.echo or request.prompt_logprobs is not None:
        num_rows += request.n * sum(len(prompt.token_ids) for prompt in prepared.prompts)
    return num_rows * per_row


async def _stream(
    prepared: _Prepared, streams: Streams, context: ApiContext
) -> AsyncGenerator[list[Event], None]:
    """The chunks of a streamed answer."""
    request, usage = prepared.request, prepared.usage_counter()
    n = request.n
    envelope = prepared.envelope("text_completion")
    choices = [
        _Choice(position * n + i, prompt, prepared)
        for position, prompt in enumerate(prepared.prompts)
        for i in range(n)
    ]

    def chunk(choice: _Choice) -> Event:
        event = {**envelope, "choices": [choice.take()]}
        if request.continuous_usage:
            event["usage"] = usage.as_json()
        elif request.include_usage:
            event["usage"] = None
        return event

    has_echo_rows = request.echo and request.logprobs is not None
    if request.echo and not has_echo_rows:
        for choice in choices:
            choice.echo(None, context)
        yield [chunk(choice) for choice in choices if choice.has_news]
    async for batch in streams.batches():
        events = []
        for position, delta in batch:
            if has_echo_rows and delta.prompt_logprobs is not None:
                # They come once, before any other choice of the prompt has begun.
                for choice in choices[position * n : (position + 1) * n]:
                    choice.echo(delta.prompt_logprobs, context)
            choice = choices[position * n + delta.index]
            choice.add(delta)
            if request.max_tokens != 0:
                usage.add(position, delta)
            elif delta.finish_reason is not None:
                choice.finish_without_output()
            if choice.has_news:
                events.append(chunk(choice))
        if events:
            yield events
    if not prepared.generations:
        for choice in choices:
            choice.finish_without_output()
        yield [chunk(choice) for choice in choices]
    if request.include_usage:
        yield [{**envelope, "choices": [], "usage": usage.as_json()}]
