"""GET /health, GET and POST /ping, /version, /load, /metrics: what probes and dashboards read."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from llmserve import __version__
from llmserve.api.context import CONTEXT
from llmserve.api.json_response import json_response
from llmserve.engine import EngineState
from llmserve.errors import EngineDeadError, EngineDrainingError, EngineError

_UNREADY: dict[EngineState, tuple[type[EngineError], str]] = {
    EngineState.STARTING: (EngineDrainingError, "the server is starting"),
    EngineState.DRAINING: (EngineDrainingError, "the server is shutting down"),
    EngineState.DEAD: (EngineDeadError, "the engine has stopped after an error"),
}


async def health(request: web.Request) -> web.Response:
    """Handler: 200 if requests are taken, else 503."""
    unready = _UNREADY.get(request.app[CONTEXT].engine.state)
    if unready is not None:
        error, message = unready
        raise error(message)
    return json_response({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    """Handler."""
    return json_response({"version": __version__})


async def load(request: web.Request) -> web.Response:
    """Handler: requests that the engine has not finished."""
    return json_response({"server_load": request.app[CONTEXT].engine.num_unfinished})


async def metrics(request: web.Request) -> web.Response:
    """Handler: Prometheus text. Made in a thread, as it reads files of /proc."""
    registry = request.app[CONTEXT].engine.stats.registry
    text = await asyncio.to_thread(generate_latest, registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
