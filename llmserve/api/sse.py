"""Server-sent events: the only code that knows how a stream looks on the wire.

One frame per event, `data: JSON` and a blank line; pings keep a silent stream alive; an error
after the headers is an event of its own. A StreamFormat holds what differs between APIs.
(WHATWG HTML, section "Server-sent events".)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from llmserve.api.error_body import describe, describe_bug
from llmserve.errors import EngineError

logger = logging.getLogger(__name__)

Event = dict[str, Any]

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def frame(event: Event) -> bytes:
    """One event as bytes; JSON holds no raw newline, so one data line is enough."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


def named_frame(event: Event) -> bytes:
    """One event whose type is also its name on the wire."""
    return b"event: " + str(event["type"]).encode() + b"\n" + frame(event)


def _unchanged(error: Event) -> Event:
    return error


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How an API writes its streams; the defaults are those of completions and chat."""

    frame: Callable[[Event], bytes] = frame
    error: Callable[[Event], Event] = _unchanged  # from OpenAI's error object to an event
    ping: bytes = b": ping\n\n"
    done: bytes = b"data: [DONE]\n\n"


_CHAT_FORMAT = StreamFormat()


async def respond_with_events(
    request: web.Request,
    batches: AsyncGenerator[list[Event], None],
    *,
    request_id: str,
    ping_interval_s: float,
    headers: dict[str, str],
    format: StreamFormat = _CHAT_FORMAT,
) -> web.StreamResponse:
    """Sends the headers at once, then each batch of events with one write, then the end mark.

    A slow reader blocks in its own `write`. Errors of `batches` become an event. A connection
    that breaks raises ConnectionError or cancels; `batches` is closed in any case.
    """
    response = web.StreamResponse(headers={**_HEADERS, **headers})
    await response.prepare(request)
    writer = _Writer(response)
    pinger = None
    if ping_interval_s:
        pinger = asyncio.create_task(writer.ping(format.ping, ping_interval_s))
    try:
        async with contextlib.aclosing(batches):
            async for events in batches:
                await writer.write(b"".join(map(format.frame, events)))
    except EngineError as error:
        await writer.write(format.frame(format.error(describe(error))))
    except ConnectionError:
        raise
    except Exception:
        logger.exception("request %s failed in its stream", request_id)
        await writer.write(format.frame(format.error(describe_bug(request_id))))
    finally:
        if pinger is not None:
            pinger.cancel()
    if format.done:
        await writer.write(format.done)
    await response.write_eof()
    return response


class _Writer:
    """Writes whole frames, and knows when the last one went out."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._clock = asyncio.get_running_loop().time
        self._last_write = self._clock()
        self._is_writing = False

    async def write(self, data: bytes) -> None:
        self._is_writing = True
        await self._response.write(data)
        self._is_writing = False
        self._last_write = self._clock()

    async def ping(self, frame: bytes, interval_s: float) -> None:
        """Writes `frame` after each `interval_s` of silence, until cancelled."""
        with contextlib.suppress(ConnectionError):  # the stream's own write reports that
            while True:
                silence = self._clock() - self._last_write
                if silence < interval_s:
                    await asyncio.sleep(interval_s - silence)
                elif self._is_writing:
                    await asyncio.sleep(interval_s)
                else:
                    await self.write(frame)
