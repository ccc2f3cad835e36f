"""The aiohttp runner that production and tests use: it answers broken HTTP in our error shape.

aiohttp answers requests that it cannot parse below the application, as plain text, and waits for
ever for the rest of a request's head. The three classes here exist to change these two things.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from llmserve.api.context import CONTEXT
from llmserve.api.error_body import (
    describe_bug,
    error_object,
    error_response,
    response_for_http_exception,
)

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 5.0


class _RequestHandler(web.RequestHandler):
    """One connection."""

    __slots__ = ("_head_timeout_s", "_head_timer")

    def __init__(self, manager: web.Server, head_timeout_s: float, **kwargs: Any) -> None:
        """head_timeout_s: what a client gets to send the head of a request, from its first byte
        or from the connection on."""
        super().__init__(manager, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._current_request is not None or self._messages:
            self._forget_timer()
        elif self._head_timer is None:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Puts a refusal that no middleware has seen, as of an unknown Expect, in our shape."""
        if isinstance(resp, web.HTTPException):
            resp = response_for_http_exception(request, resp)
            resp.headers["X-Request-Id"] = uuid4().hex
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """A body that cannot be read has had its 400, and is met again when its rest is skipped."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._head_timeout_s, self.force_close)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that no handler got; the connection is closed after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; its connection cannot be used again")
        request_id = uuid4().hex
        headers = {"X-Request-Id": request_id, "Server": "llmserve"}
        if isinstance(exc, HttpProcessingError) or status < 500:
            logger.debug("refused a malformed HTTP request from %s: %s", request.remote, exc)
            reason = " ".join((message or "it cannot be parsed").split())[:200]
            body = error_object(f"malformed HTTP request: {reason}", type="invalid_request_error")
        else:
            logger.error("request %s failed", request_id, exc_info=exc)
            body = describe_bug(request_id)
        response = error_response(status, body, headers)
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s

    def __call__(self) -> web.RequestHandler:
        return _RequestHandler(self, self._head_timeout_s, loop=self._loop, **self._kwargs)


class ApiRunner(web.AppRunner):
    """AppRunner for the application of `make_app`: a client that leaves cancels its handler."""

    __slots__ = ()

    def __init__(self, app: web.Application) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            loop=server._loop,
            head_timeout_s=self.app[CONTEXT].body_timeout_s,
            **server._kwargs,
        )
