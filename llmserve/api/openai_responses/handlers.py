"""The routes of the Responses API."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from llmserve.api.body import parse_object, read_body, run_sized
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.fields import refuse, validate
from llmserve.api.json_response import json_response
from llmserve.api.middleware import REQUEST_ID
from llmserve.api.openai_responses.run import ResponseRun
from llmserve.api.openai_responses.schema import ResponsesPrompt
from llmserve.api.openai_responses.store import STORE, ResponseStore
from llmserve.api.openai_responses.translation import (
    PreparedResponse,
    count_input_tokens,
    parse_request,
    prepare_response,
)
from llmserve.api.prompts import run_preparation
from llmserve.api.sse import StreamFormat, named_frame, respond_with_events
from llmserve.errors import RequestError

_STREAM_FORMAT = StreamFormat(frame=named_frame, done=b"")
_MAX_LISTED = 100


def add_responses_routes(app: web.Application, max_count: int, max_bytes: int) -> None:
    """The routes and the store behind them."""
    app[STORE] = ResponseStore(max_count, max_bytes)
    app.add_routes(
        [
            web.post("/v1/responses", create_response),
            web.post("/v1/responses/input_tokens", input_tokens),
            web.get("/v1/responses/{id}", get_response, allow_head=False),
            web.delete("/v1/responses/{id}", delete_response),
            web.post("/v1/responses/{id}/cancel", cancel_response),
            web.get("/v1/responses/{id}/input_items", list_input_items, allow_head=False),
        ]
    )


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handler."""
    context, store = request.app[CONTEXT], request.app[STORE]
    prepared = await _prepare(request)
    run = ResponseRun(prepared, context, store)
    headers = prepared.chat.headers
    try:
        if prepared.parsed.request.stream:
            return await respond_with_events(
                request,
                run.events(request[REQUEST_ID]),
                request_id=request[REQUEST_ID],
                ping_interval_s=context.config.sse_ping_interval,
                headers=headers,
                format=_STREAM_FORMAT,
            )
        body = await run.answer()
        return web.Response(body=body, content_type="application/json", headers=headers)
    finally:
        run.abort()


async def _prepare(request: web.Request) -> PreparedResponse:
    context, store = request.app[CONTEXT], request.app[STORE]
    body = await read_body(request)
    parsed = await run_sized(len(body), parse_request, body)
    history = store.history(parsed.request.previous_response_id)

    def work(context: ApiContext) -> PreparedResponse:
        return prepare_response(
            parsed, history, context, request[REQUEST_ID], is_store_enabled=store.is_enabled
        )

    size = len(body) + sum(map(len, history))
    return await run_preparation(context, size, work)


async def input_tokens(request: web.Request) -> web.Response:
    """Handler: how many tokens the prompt of such a request has."""
    context, store = request.app[CONTEXT], request.app[STORE]
    body = await read_body(request)
    sent = await run_sized(len(body), parse_object, body)
    asked = await run_sized(len(body), validate, ResponsesPrompt, sent)
    history = store.history(asked.previous_response_id)
    count, headers = await run_preparation(
        context,
        len(body) + sum(map(len, history)),
        lambda context: count_input_tokens(asked, sent, history, context),
    )
    answer = {"object": "response.input_tokens", "input_tokens": count}
    return json_response(answer, headers=headers)


async def get_response(request: web.Request) -> web.Response:
    """Handler."""
    store, response_id = request.app[STORE], request.match_info["id"]
    if request.query.get("stream", "false") == "true":
        raise RequestError(
            "stream is true; only background responses can be streamed again, and this server "
            "runs none",
            param="stream",
        )
    running = store.running.get(response_id)
    if running is not None:
        return json_response(running.snapshot())
    return web.Response(body=store.get(response_id).response, content_type="application/json")


async def delete_response(request: web.Request) -> web.Response:
    """Handler."""
    response_id = request.match_info["id"]
    request.app[STORE].delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """Handler: ends a response that another request waits for."""
    store, response_id = request.app[STORE], request.match_info["id"]
    running = store.running.get(response_id)
    if running is None:
        status = orjson.loads(store.get(response_id).response)["status"]
        raise RequestError(
            f"the response {response_id!r} is {status}; only one that runs can be cancelled",
            param="id",
        )
    return json_response(running.cancel())


async def list_input_items(request: web.Request) -> web.Response:
    """Handler: the items of the request itself, without those that it continued."""
    stored = request.app[STORE].get(request.match_info["id"])
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", order, "asc or desc")
    limit = request.query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_LISTED:
        refuse("limit", limit, f"an integer from 1 to {_MAX_LISTED}")
    after = request.query.get("after")
    size = len(stored.input_items)
    return json_response(await run_sized(size, _page, stored.input_items, order, int(limit), after))


def _page(input_items: bytes, order: str, limit: int, after: str | None) -> dict[str, Any]:
    items: list[dict[str, Any]] = orjson.loads(input_items)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            refuse("after", after, "the id of an item of this response")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
