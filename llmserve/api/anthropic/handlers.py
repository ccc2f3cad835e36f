"""The routes of the Messages API. Their errors are in Anthropic's shape (see error_body)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from llmserve.api.anthropic.output import Content, messages_usage
from llmserve.api.anthropic.translation import (
    PreparedMessage,
    count_message_tokens,
    prepare_message,
)
from llmserve.api.body import read_body
from llmserve.api.chat_source import ChatRun
from llmserve.api.context import CONTEXT
from llmserve.api.error_body import anthropic_error
from llmserve.api.json_response import json_response
from llmserve.api.middleware import REQUEST_ID
from llmserve.api.prompts import run_preparation
from llmserve.api.sse import Event, StreamFormat, named_frame, respond_with_events

_PING: Event = {"type": "ping"}
_STREAM_FORMAT = StreamFormat(
    frame=named_frame,
    error=lambda error: anthropic_error(error, 500),
    ping=named_frame(_PING),
    done=b"",
)


def add_messages_routes(app: web.Application) -> None:
    app.add_routes(
        [
            web.post("/v1/messages", create_message),
            web.post("/v1/messages/count_tokens", count_tokens),
        ]
    )


async def create_message(request: web.Request) -> web.StreamResponse:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    prepared = await run_preparation(
        context,
        len(body),
        lambda context: prepare_message(body, context, request[REQUEST_ID]),
    )
    headers = prepared.chat.headers
    run = ChatRun(prepared.chat, context)
    try:
        if prepared.request.stream:
            return await respond_with_events(
                request,
                _events(prepared, run),
                request_id=request[REQUEST_ID],
                ping_interval_s=context.config.sse_ping_interval,
                headers=headers,
                format=_STREAM_FORMAT,
            )
        return json_response(await _answer(prepared, run), headers=headers)
    finally:
        run.abort()


async def count_tokens(request: web.Request) -> web.Response:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    count, headers = await run_preparation(
        context, len(body), lambda context: count_message_tokens(body, context)
    )
    return json_response({"input_tokens": count}, headers=headers)


async def _answer(prepared: PreparedMessage, run: ChatRun) -> dict[str, Any]:
    content = Content()
    async with contextlib.aclosing(run.chunks()) as batches:
        async for batch in batches:
            for chunk in batch:
                content.add(chunk)
    content.finish()
    return {
        **_message(prepared),
        "content": content.blocks,
        "stop_reason": content.stop_reason,
        "stop_sequence": content.stop_sequence,
        "usage": content.usage,
    }


async def _events(prepared: PreparedMessage, run: ChatRun) -> AsyncGenerator[list[Event], None]:
    content = Content()
    yield [{"type": "message_start", "message": _message(prepared)}, _PING]
    async with contextlib.aclosing(run.chunks()) as batches:
        async for batch in batches:
            events = [event for chunk in batch for event in content.add(chunk)]
            if events:
                yield events
    delta = {"stop_reason": content.stop_reason, "stop_sequence": content.stop_sequence}
    yield [
        *content.finish(),
        {"type": "message_delta", "delta": delta, "usage": content.usage},
        {"type": "message_stop"},
    ]


def _message(prepared: PreparedMessage) -> dict[str, Any]:
    """The message before anything of it is written; what the cache gives is not known yet."""
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.chat.prompts)
    return {
        "id": prepared.id,
        "type": "message",
        "role": "assistant",
        "model": prepared.chat.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": messages_usage({"prompt_tokens": num_prompt_tokens}),
    }
