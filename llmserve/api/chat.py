"""POST /v1/chat/completions: a conversation in, the next message out, at once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from llmserve.api.body import INLINE_BYTES, parse_object, read_body, run_sized
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.fields import validate
from llmserve.api.json_response import json_response
from llmserve.api.logprobs import chat_logprobs, prompt_logprobs
from llmserve.api.messages import check_tool_choice
from llmserve.api.middleware import REQUEST_ID
from llmserve.api.preparation import Prepared, make_generations, note_ignored, token_names
from llmserve.api.prompts import encode_conversation, truncate
from llmserve.api.sampling import check_stream_fields, make_sampling_params, resolve_logprobs
from llmserve.api.schemas import ChatRequest
from llmserve.api.sse import Event, respond_with_events
from llmserve.api.streams import Streams
from llmserve.api.tool_calls import ToolCall, tool_call_parser
from llmserve.config import FrontendConfig
from llmserve.core import FinishReason, OutputDelta
from llmserve.errors import RequestError

_Prepared = Prepared[ChatRequest]


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    request_id = request[REQUEST_ID]
    # A client's own template may take any time, so it never runs on the event loop.
    size = INLINE_BYTES + 1 if context.config.trust_request_chat_template else len(body)
    prepared = await run_sized(size, prepare_chat, body, context, request_id)
    streams = Streams(context.engine, prepared.generations)
    role = answer_role(prepared.request, context)
    try:
        if prepared.request.stream:
            return await respond_with_events(
                request,
                stream_chunks(prepared, streams, role, context.config),
                request_id=request_id,
                ping_interval_s=context.config.sse_ping_interval,
                headers=prepared.headers,
            )
        collected: list[OutputDelta] = []
        async for batch in streams.batches():
            collected += [delta for _, delta in batch]
        size = _answer_size(prepared, collected)
        answer = await run_sized(size, _make_answer, prepared, collected, role, context.config)
        return json_response(answer, headers=prepared.headers)
    finally:
        streams.abort()


def answer_role(request: ChatRequest, context: ApiContext) -> str:
    """A continued message keeps its role; a new one has the server's."""
    if request.continue_final_message:
        return str(request.messages[-1]["role"])
    return context.config.response_role


def prepare_chat(body: bytes, context: ApiContext, request_id: str) -> _Prepared:
    """From bytes to what the engine shall do. Raises RequestError."""
    return prepare_chat_fields(parse_object(body), context, request_id)


def prepare_chat_fields(fields: dict[str, Any], context: ApiContext, request_id: str) -> _Prepared:
    """From a request's fields to what the engine shall do. Raises RequestError."""
    request = resolve_logprobs(validate(ChatRequest, fields), context)
    model = context.resolve_model(request.model)
    ignored = note_ignored(request, fields, context)
    num_logprobs = _num_logprobs(request)
    check_tool_choice(request.tool_choice, request.tools)
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
    prompt = truncate(prompt, request, context.engine.max_model_len, asked)
    sampling = make_sampling_params(
        request,
        context,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
    )
    response_id = f"chatcmpl-{request.request_id or request_id}"
    return Prepared(
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


class _Choice:
    """One choice of the answer. What `add` takes in is given out once, as JSON."""

    def __init__(self, index: int, prepared: _Prepared, config: FrontendConfig) -> None:
        self.index = index
        self._request = prepared.request
        self._names = prepared.names
        self._parser = tool_call_parser(prepared.request, config)
        self._calls: list[ToolCall] = []
        self._has_calls = False
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def has_text(self) -> bool:
        return any(self._texts)

    @property
    def has_calls(self) -> bool:
        """Calls that were not given out yet."""
        return bool(self._calls)

    def add(self, delta: OutputDelta) -> None:
        self._add_text(delta.text, is_last=delta.finish_reason is not None)
        if self._request.logprobs:
            self._logprobs += chat_logprobs(delta, self._names)
        if self._request.return_token_ids:
            self._token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self._stop_reason = delta.stop_reason
            if self._has_calls and delta.finish_reason is FinishReason.STOP:
                self.finish_reason = "tool_calls"

    def _add_text(self, text: str, *, is_last: bool) -> None:
        if self._parser is None:
            self._texts.append(text)
            return
        parts = [self._parser.feed(text)]
        if is_last:
            parts.append(self._parser.flush())
        for part in parts:
            self._texts.append(part.content)
            self._calls += part.calls
        self._has_calls = self._has_calls or bool(self._calls)

    def take_text(self) -> str:
        text = "".join(self._texts)
        self._texts = []
        return text

    def message(self, role: str) -> dict[str, Any]:
        """The choice of an unstreamed answer."""
        message: dict[str, Any] = {"role": role, "content": self.take_text(), "refusal": None}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"}
                for call in self._take_calls()
            ]
        return self._with_details({"index": self.index, "message": message}, is_last=True)

    def text_delta(self) -> dict[str, Any]:
        """The choice of a chunk with text."""
        delta = {"content": self.take_text()}
        return self._with_details({"index": self.index, "delta": delta}, is_last=False)

    def call_delta(self) -> dict[str, Any]:
        """The choice of a chunk with tool calls."""
        delta = {"tool_calls": self._take_calls()}
        return self._with_details({"index": self.index, "delta": delta}, is_last=False)

    def last_delta(self) -> dict[str, Any]:
        """The choice of the chunk that says why the text ended."""
        return self._with_details({"index": self.index, "delta": {}}, is_last=True)

    def _take_calls(self) -> list[dict[str, Any]]:
        calls, self._calls = self._calls, []
        return [
            {
                "index": call.index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _with_details(self, choice: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        rows, self._logprobs = self._logprobs, []
        has_rows = self._request.logprobs and (rows or "message" in choice)
        choice["logprobs"] = {"content": rows, "refusal": None} if has_rows else None
        choice["finish_reason"] = self.finish_reason if is_last else None
        if is_last:
            choice["stop_reason"] = self._stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = self._token_ids
            self._token_ids = []
        return choice


def _make_answer(
    prepared: _Prepared, collected: list[OutputDelta], role: str, config: FrontendConfig
) -> dict[str, Any]:
    """The answer to an unstreamed request."""
    request, usage = prepared.request, prepared.usage_counter()
    choices = [_Choice(index, prepared, config) for index in range(request.n)]
    for delta in collected:
        choices[delta.index].add(delta)
        usage.add(0, delta)
    answer = {
        **prepared.envelope("chat.completion"),
        "choices": [choice.message(role) for choice in choices],
        "usage": usage.as_json(),
    }
    if request.return_token_ids:
        answer["prompt_token_ids"] = prepared.prompts[0].token_ids
    if request.prompt_logprobs is not None:
        rows = next((d.prompt_logprobs for d in collected if d.prompt_logprobs is not None), [])
        answer["prompt_logprobs"] = prompt_logprobs(
            rows, prepared.names, limit=request.prompt_logprobs
        )
    return answer


def _answer_size(prepared: _Prepared, collected: list[OutputDelta]) -> int:
    """Roughly the bytes that building the answer goes through."""
    request = prepared.request
    size = sum(len(delta.token_ids) for delta in collected) * 8
    if request.logprobs:
        size *= 16 * (1 + (request.top_logprobs or 0))
    if request.prompt_logprobs is not None:
        size += len(prepared.prompts[0].token_ids) * 64 * (1 + request.prompt_logprobs)
    return size


async def stream_chunks(
    prepared: _Prepared, streams: Streams, role: str, config: FrontendConfig
) -> AsyncGenerator[list[Event], None]:
    """The chunks of a streamed answer."""
    request, usage = prepared.request, prepared.usage_counter()
    envelope = prepared.envelope("chat.completion.chunk")
    choices = [_Choice(index, prepared, config) for index in range(request.n)]

    def chunk(choice: dict[str, Any]) -> Event:
        event = {**envelope, "choices": [choice]}
        if request.continuous_usage:
            event["usage"] = usage.as_json()
        elif request.include_usage:
            event["usage"] = None
        return event

    first = [chunk(_role_choice(index, role)) for index in range(request.n)]
    if request.return_token_ids:
        first[0]["prompt_token_ids"] = prepared.prompts[0].token_ids
    yield first
    async for batch in streams.batches():
        events = []
        for _, delta in batch:
            choice = choices[delta.index]
            choice.add(delta)
            usage.add(0, delta)
            if choice.has_text:
                events.append(chunk(choice.text_delta()))
            if choice.has_calls:
                events.append(chunk(choice.call_delta()))
            if choice.finish_reason is not None:
                events.append(chunk(choice.last_delta()))
        if events:
            yield events
    if request.include_usage:
        yield [{**envelope, "choices": [], "usage": usage.as_json()}]


def _role_choice(index: int, role: str) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": role, "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
