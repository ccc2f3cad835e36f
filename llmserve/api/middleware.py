"""Around every handler: request id, metrics, API key, CORS, and errors turned into answers."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from llmserve.api.description.paths import OPEN_PATHS as DESCRIPTION_PATHS
from llmserve.api.error_body import (
    describe_bug,
    error_response,
    in_shape_of,
    is_anthropic,
    response_for,
    response_for_http_exception,
)
from llmserve.api.http_metrics import HttpMetrics
from llmserve.errors import AuthenticationError, EngineError, RequestError

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")

# Probes and the pages of a browser carry no key.
_OPEN_PATHS = frozenset({"/health", "/ping"}) | DESCRIPTION_PATHS

_PREFLIGHT_MAX_AGE_S = "86400"
_ALLOWED_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED_HEADERS = "X-Request-Id, X-Ignored-Params, Retry-After"


def request_id_of(request: web.Request) -> str:
    """The client's own X-Request-Id if it is a harmless string, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _SANE_REQUEST_ID.fullmatch(given) else uuid4().hex


def make_outer(metrics: HttpMetrics) -> Middleware:
    """Outermost: names the request, measures it, and answers every error in one shape."""

    @web.middleware
    async def outer(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id = request_id_of(request)
        start = time.monotonic()
        status = 499  # the client went away; nginx's code for it
        try:
            response = await _answer(request, handler, request_id)
            status = response.status
            return response
        finally:
            metrics.observe(request, status, time.monotonic() - start)

    return outer


async def _answer(request: web.Request, handler: Handler, request_id: str) -> web.StreamResponse:
    try:
        return await handler(request)
    except (RequestError, EngineError) as error:
        return in_shape_of(request.path, response_for(error))
    except web.HTTPException as error:
        return in_shape_of(request.path, response_for_http_exception(request, error))
    except ConnectionError:
        raise  # the client has gone; nobody reads an answer
    except Exception:
        logger.exception("request %s failed: %s %s", request_id, request.method, request.path)
        response = error_response(500, describe_bug(request_id), {})
        return in_shape_of(request.path, response)


def make_auth(api_keys: tuple[str, ...]) -> Middleware:
    """Every route but the probes needs one of the keys, as bearer token or as x-api-key."""
    digests = [_digest(key) for key in api_keys]

    @web.middleware
    async def auth(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in _OPEN_PATHS or request.method == "OPTIONS"
        if digests and not is_open and not _has_key(request, digests):
            raise AuthenticationError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'"
            )
        return await handler(request)

    return auth


def _has_key(request: web.Request, digests: list[bytes]) -> bool:
    """Compares in time that tells nothing about the keys: digests, all of them, no early end."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    sent = [_digest(bearer), _digest(request.headers.get("x-api-key", "").strip())]
    matches = [hmac.compare_digest(digest, known) for digest in sent for known in digests]
    return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def make_preflight(allowed_origins: tuple[str, ...]) -> Middleware:
    """Answers CORS preflights (WHATWG Fetch, "CORS protocol")."""

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = (
            request.method == "OPTIONS"
            and "Origin" in request.headers
            and "Access-Control-Request-Method" in request.headers
        )
        if not (allowed_origins and is_preflight):
            return await handler(request)
        # "*" would not cover Authorization, so the wanted names are repeated.
        wanted = request.headers.get("Access-Control-Request-Headers")
        headers = {
            "Access-Control-Allow-Methods": _ALLOWED_METHODS,
            "Access-Control-Allow-Headers": wanted or "authorization, content-type",
            "Access-Control-Max-Age": _PREFLIGHT_MAX_AGE_S,
        }
        return web.Response(status=204, headers=headers)

    return preflight


def make_prepare_hook(
    allowed_origins: tuple[str, ...],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Headers of every response, set when it is prepared so that streams have them too."""

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "llmserve"
        if REQUEST_ID in request:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
            if is_anthropic(request.path):
                response.headers["request-id"] = request[REQUEST_ID]
        origin = request.headers.get("Origin")
        if not allowed_origins or origin is None:
            return
        if "*" in allowed_origins:
            response.headers["Access-Control-Allow-Origin"] = "*"
        else:
            response.headers.add("Vary", "Origin")
            if origin not in allowed_origins:
                return
            response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS

    return add_headers
