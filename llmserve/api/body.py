"""Request bodies: from the socket to a checked JSON object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from llmserve.api.context import CONTEXT
from llmserve.api.json_parser import parse_json
from llmserve.errors import RequestError

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Work on inputs up to this size takes less than about 5 ms and runs on the event loop, which
# costs less than a thread switch; work on larger ones runs in a thread.
INLINE_BYTES = 8192
# What aiohttp decodes; it passes other ones on as they are.
_CONTENT_ENCODINGS = ("identity", "gzip", "deflate")
# Of a request; more than four times as many as are known.
MAX_FIELDS = 500


async def read_body(request: web.Request) -> bytes:
    """The whole body of a JSON request. Raises RequestError (408, 413, 415, 400)."""
    media_type = request.content_type.lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            f"the content type is {request.headers.get('Content-Type', '')[:100]!r}; "
            "it must be application/json",
            status=415,
        )
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in _CONTENT_ENCODINGS:
        raise RequestError(
            f"the content encoding is {encoding[:100]!r}; "
            f"it must be one of {', '.join(_CONTENT_ENCODINGS)}",
            status=415,
        )
    limit = request.client_max_size
    timeout_s = request.app[CONTEXT].body_timeout_s
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise RequestError(
            f"the request body did not arrive within {timeout_s:g} s", status=408
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    except web.RequestPayloadError as error:
        cause = error.__cause__  # in its own words, without a status and a line break
        reason = cause.message if isinstance(cause, HttpProcessingError) else error
        raise RequestError(f"the request body cannot be read: {reason}") from error


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; NaN, infinities, deep nesting and invalid UTF-8 are refused."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise RequestError(
            f"the request body has {len(value)} fields; it must have at most {MAX_FIELDS}"
        )
    return value


async def run_sized(size: int, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Runs `work` here if its input of `size` bytes is small, else in a worker thread."""
    if size <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the request body is larger than {limit} bytes", status=413)
