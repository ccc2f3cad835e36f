"""JSON answers."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web


def json_response(body: dict[str, Any], *, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), content_type="application/json", headers=headers or {}
    )
