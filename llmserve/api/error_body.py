"""Errors as OpenAI's error object, for every route and for errors inside streams.

Under /v1/messages the same errors are written in Anthropic's shape.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from llmserve.errors import (
    AuthenticationError,
    EngineDeadError,
    EngineError,
    RequestError,
)

_RETRY_AFTER_S = "5"

_ANTHROPIC_PATH = "/v1/messages"
# Anthropic names the kind of an error by its status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(
    message: str, *, type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def anthropic_error(error: dict[str, Any], status: int) -> dict[str, Any]:
    """Anthropic's shape of an OpenAI error object."""
    fallback = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, fallback)
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


def is_anthropic(path: str) -> bool:
    """Whether clients of Anthropic's API call the route at `path`."""
    return path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")


def in_shape_of(path: str, response: web.Response) -> web.Response:
    """The answer to an error as clients of the route at `path` expect it."""
    if is_anthropic(path):
        body = orjson.loads(response.body if isinstance(response.body, bytes) else b"{}")
        response.body = orjson.dumps(anthropic_error(body, response.status))
    return response


def error_response(status: int, body: dict[str, Any], headers: dict[str, str]) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps(body),
        headers=headers,
        content_type="application/json",
    )


def describe(error: RequestError | EngineError) -> dict[str, Any]:
    """The error object of an error raised on purpose."""
    if isinstance(error, RequestError):
        return error_object(error.message, type=error.type, param=error.param, code=error.code)
    return error_object(str(error), type=error.type, code=error.code)


def describe_bug(request_id: str) -> dict[str, Any]:
    """The error object of an error that nobody foresaw: no internals, but what to search for."""
    return error_object(
        f"internal error; the server's log has the cause under request id {request_id}",
        type="internal_server_error",
    )


def response_for(error: RequestError | EngineError) -> web.Response:
    """The answer to an error raised on purpose, before any header was sent."""
    headers: dict[str, str] = {}
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = _RETRY_AFTER_S
    if isinstance(error, EngineDeadError):
        headers["X-Should-Retry"] = "false"  # obeyed by OpenAI's client libraries
    return error_response(error.status, describe(error), headers)


def response_for_http_exception(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (404, 405, 413, ...) in our shape; Allow and such are kept."""
    where = f"{request.method} {request.path[:200]}"
    messages = {
        404: f"there is no route {where}",
        405: f"{where}: this route takes {error.headers.get('Allow', 'other methods')} only",
        413: "the request body is too large for this server",
    }
    message = messages.get(error.status, f"{where}: {error.reason}")
    kept = {name: value for name, value in error.headers.items() if name != "Content-Type"}
    kept.pop("Content-Length", None)
    body = error_object(message, type="invalid_request_error")
    return error_response(error.status, body, kept)
