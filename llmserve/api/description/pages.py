"""GET /openapi.json, and GET /docs: Swagger UI out of the package swagger-ui-py, no CDN."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from llmserve.api.context import CONTEXT
from llmserve.api.description.document import build_document
from llmserve.api.description.paths import DOCUMENT, PAGE, PAGE_FILES

_HTML = b"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llmserve API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({url: "openapi.json", dom_id: "#docs", deepLinking: true});
</script>
</body>
</html>
"""


class _Description:
    """Made when it is asked for first, which takes about 0.1 s."""

    def __init__(self) -> None:
        self._body: asyncio.Future[bytes] | None = None

    async def handle(self, request: web.Request) -> web.Response:
        if self._body is None:
            self._body = asyncio.ensure_future(asyncio.to_thread(_build, request.app))
        body = await asyncio.shield(self._body)
        return web.Response(body=body, content_type="application/json")


def _build(app: web.Application) -> bytes:
    routes = [
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    ]
    return orjson.dumps(build_document(routes, has_keys=bool(app[CONTEXT].config.api_key)))


def add_description_routes(app: web.Application) -> None:
    """The description's routes; the page only where its files are installed."""
    app.router.add_get(DOCUMENT, _Description().handle)
    folder = _swagger_ui()
    if folder is None:
        return
    app.router.add_get(PAGE, _show)
    for name in PAGE_FILES:
        app.router.add_get(f"{PAGE}/{name}", _sender(folder / name))


def _swagger_ui() -> Path | None:
    """The folder of Swagger UI's files. The package is not imported: it is code for frameworks."""
    spec = importlib.util.find_spec("swagger_ui")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "static"


async def _show(request: web.Request) -> web.Response:
    return web.Response(body=_HTML, content_type="text/html", charset="utf-8")


def _sender(path: Path) -> Handler:
    async def send(request: web.Request) -> web.FileResponse:
        return web.FileResponse(path, headers={"Cache-Control": "public, max-age=86400"})

    return send
