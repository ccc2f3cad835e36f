"""The aiohttp runner that production and tests use: it answers broken HTTP in our error shape.

aiohttp answers requests that it cannot parse below the application, as plain text. The three
classes here exist to replace that one method.
"""

from __future__ import annotations

import logging
from uuid import uuid4

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from llmserve.api.error_body import describe_bug, error_object, error_response

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 5.0


class _RequestHandler(web.RequestHandler):
    """One connection."""

    __slots__ = ()

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
        headers = {"X-Request-Id": request_id}
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
    def __call__(self) -> web.RequestHandler:
        return _RequestHandler(self, loop=self._loop, **self._kwargs)


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
            **server._kwargs,
        )
