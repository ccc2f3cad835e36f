"""A response from its first event to its last: generation, cancellation, storing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from llmserve.api.body import run_sized
from llmserve.api.chat_source import ChatRun
from llmserve.api.context import ApiContext
from llmserve.api.error_body import describe, describe_bug
from llmserve.api.openai_responses.output import Output
from llmserve.api.openai_responses.store import ResponseStore, RunningResponse, StoredResponse
from llmserve.api.openai_responses.translation import (
    PreparedResponse,
    response_object,
    responses_usage,
)
from llmserve.api.sse import Event
from llmserve.errors import EngineError

logger = logging.getLogger(__name__)

_TERMINAL_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class ResponseRun:
    """One response. The owner calls `abort` in a `finally`."""

    def __init__(
        self, prepared: PreparedResponse, context: ApiContext, store: ResponseStore
    ) -> None:
        self.prepared = prepared
        self._store = store
        self._output = Output()
        self._is_cancelled = False
        self._run = ChatRun(prepared.chat, context)
        self._sequence_number = 0
        if prepared.is_stored:
            store.running[prepared.id] = RunningResponse(self._snapshot, self._cancel)

    def abort(self) -> None:
        """Ends the generation if it runs; idempotent."""
        self._run.abort()
        self._store.running.pop(self.prepared.id, None)

    async def answer(self) -> bytes:
        """The whole response as JSON. Raises EngineError."""
        async with contextlib.aclosing(self._run.chunks()) as batches:
            async for batch in batches:
                for chunk in batch:
                    self._output.add(chunk)
        status = self._final_status()
        self._output.finish(_item_status(status))
        return await self._end(status)

    async def events(self, request_id: str) -> AsyncGenerator[list[Event], None]:
        """The events of the streamed response; what goes wrong is an event too."""
        yield self._numbered(
            [
                {"type": "response.created", "response": self._snapshot()},
                {"type": "response.in_progress", "response": self._snapshot()},
            ]
        )
        error: dict[str, Any] | None = None
        try:
            async with contextlib.aclosing(self._run.chunks()) as batches:
                async for batch in batches:
                    events = [event for chunk in batch for event in self._output.add(chunk)]
                    if events:
                        yield self._numbered(events)
        except EngineError as failure:
            error = describe(failure)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("request %s failed in its stream", request_id)
            error = describe_bug(request_id)
        status = "failed" if error is not None else self._final_status()
        closing = self._output.finish(_item_status(status))
        yield self._numbered(await run_sized(self._size(), _pack, closing))
        body = await self._end(status, error)
        yield self._numbered(
            [{"type": _TERMINAL_EVENTS[status], "response": orjson.Fragment(body)}]
        )

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sequence_number
            self._sequence_number += 1
        return events

    def _snapshot(self) -> dict[str, Any]:
        status = "cancelled" if self._is_cancelled else "in_progress"
        return {**response_object(self.prepared, status), "output": self._output.items}

    def _cancel(self) -> dict[str, Any]:
        self._is_cancelled = True
        self._run.abort()
        return self._snapshot()

    def _final_status(self) -> str:
        if self._is_cancelled:
            return "cancelled"
        reason = self._output.finish_reason
        if reason == "length":
            return "incomplete"
        return "failed" if reason in ("abort", "error", None) else "completed"

    async def _end(self, status: str, error: dict[str, Any] | None = None) -> bytes:
        """The ended response as JSON; it is stored if it was asked to be."""
        response = response_object(self.prepared, status)
        response["output"] = self._output.items
        if self._output.usage is not None:
            response["usage"] = responses_usage(self._output.usage)
        if status == "completed":
            response["completed_at"] = int(time.time())
        elif status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            message = (
                "the server aborted the response" if error is None else error["error"]["message"]
            )
            response["error"] = {"code": "server_error", "message": message}
        body, output_items, input_items = await run_sized(
            self._size(), _dump, response, self.prepared.parsed.request.input
        )
        self._store.running.pop(self.prepared.id, None)
        if self.prepared.is_stored:
            previous_id = self.prepared.parsed.request.previous_response_id
            stored = StoredResponse(body, input_items, output_items, previous_id)
            self._store.put(self.prepared.id, stored)
        return body

    def _size(self) -> int:
        """Roughly the bytes that JSON is made of."""
        request = self.prepared.parsed.request
        usage = self._output.usage or {}
        per_token = 8 + (100 * (1 + request.top_logprobs) if request.has_logprobs else 0)
        num_tokens = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        return per_token * int(num_tokens)


def _pack(events: list[Event]) -> list[Event]:
    """The same events with their large values as JSON, since logprobs take long to write."""
    large = ("item", "part", "logprobs")
    return [
        {k: orjson.Fragment(orjson.dumps(v)) if k in large else v for k, v in event.items()}
        for event in events
    ]


def _item_status(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def _dump(
    response: dict[str, Any], input_items: list[dict[str, Any]]
) -> tuple[bytes, bytes, bytes]:
    return orjson.dumps(response), orjson.dumps(response["output"]), orjson.dumps(input_items)
