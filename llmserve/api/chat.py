"""POST /v1/chat/completions: a conversation in, the next message out, at once or as a stream."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from llmserve.api.body import parse_object, read_body, run_sized
from llmserve.api.chat_answer import ChatPrepared, answer_size, make_answer, stream_chunks
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.fields import validate
from llmserve.api.json_response import json_response
from llmserve.api.middleware import REQUEST_ID
from llmserve.api.output_grammar import output_grammar, thinking_budget
from llmserve.api.output_plan import fields_without_effect, plan_output
from llmserve.api.preparation import make_generations, note_ignored, token_names
from llmserve.api.prompts import encode_conversation, run_preparation, truncate
from llmserve.api.sampling import check_stream_fields, make_sampling_params, resolve_logprobs
from llmserve.api.schemas import ChatRequest
from llmserve.api.sse import respond_with_events
from llmserve.api.streams import Streams
from llmserve.core import OutputDelta
from llmserve.errors import RequestError


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    request_id = request[REQUEST_ID]
    prepared = await run_preparation(
        context, len(body), lambda context: prepare_chat(body, context, request_id)
    )
    streams = Streams(context.engine, prepared.generations)
    role = answer_role(prepared.request, context)
    try:
        if prepared.request.stream:
            return await respond_with_events(
                request,
                stream_chunks(prepared, streams, role),
                request_id=request_id,
                ping_interval_s=context.config.sse_ping_interval,
                headers=prepared.headers,
            )
        collected: list[OutputDelta] = []
        async for batch in streams.batches():
            collected += [delta for _, delta in batch]
        size = answer_size(prepared, collected)
        answer = await run_sized(size, make_answer, prepared, collected, role)
        return json_response(answer, headers=prepared.headers)
    finally:
        streams.abort()


def answer_role(request: ChatRequest, context: ApiContext) -> str:
    """A continued message keeps its role; a new one has the server's."""
    if request.continue_final_message:
        return str(request.messages[-1]["role"])
    return context.config.response_role


def prepare_chat(body: bytes, context: ApiContext, request_id: str) -> ChatPrepared:
    """From bytes to what the engine shall do. Raises RequestError."""
    return prepare_chat_fields(parse_object(body), context, request_id)


def prepare_chat_fields(
    fields: dict[str, Any], context: ApiContext, request_id: str
) -> ChatPrepared:
    """From a request's fields to what the engine shall do. Raises RequestError."""
    request = resolve_logprobs(validate(ChatRequest, fields), context)
    model = context.resolve_model(request.model)
    num_logprobs = _num_logprobs(request)
    check_stream_fields(request)
    asked = request.max_completion_tokens
    if asked is None:
        asked = request.max_tokens
    prompt = encode_conversation(
        request.messages,
        request,
        context,
        add_special_tokens=request.add_special_tokens,
        is_bounded=request.truncate_prompt_tokens is None,
    )
    plan = plan_output(request, prompt.text or "", context)
    ignored = note_ignored(request, fields, context, fields_without_effect(request, plan, context))
    prompt = truncate(prompt, request, context.engine.max_model_len, asked)
    sampling = make_sampling_params(
        request,
        context,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        grammar=output_grammar(request, plan, context),
    )
    sampling = dataclasses.replace(
        sampling,
        skip_special_tokens=plan.engine_skips_special_tokens,
        thinking_budget=thinking_budget(request, plan, context),
    )
    if plan.choice.is_forced:
        sampling = dataclasses.replace(sampling, stop=(), stop_token_ids=())
    response_id = f"chatcmpl-{request.request_id or request_id}"
    return ChatPrepared(
        request=request,
        prompts=[prompt],
        generations=make_generations(
            request,
            [prompt],
            sampling,
            context,
            response_id=response_id,
            asked_max_tokens=asked,
            default_max_tokens=None,
        ),
        response_id=response_id,
        model=model,
        names=token_names(request, context),
        ignored=ignored,
        plan=plan,
    )


def _num_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise RequestError(
                f"top_logprobs is {request.top_logprobs}; it needs logprobs = true",
                param="top_logprobs",
            )
        return None
    return request.top_logprobs or 0
