"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from llmserve.api.context import CONTEXT, ModelInfo
from llmserve.api.json_response import json_response


async def list_models(request: web.Request) -> web.Response:
    """Handler."""
    model = request.app[CONTEXT].model
    return json_response({"object": "list", "data": [_card(model, name) for name in model.names]})


async def get_model(request: web.Request) -> web.Response:
    """Handler; an unknown name is a 404 with model_not_found."""
    context = request.app[CONTEXT]
    return json_response(_card(context.model, context.resolve_model(request.match_info["id"])))


def _card(model: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "llmserve",
        "root": model.root or model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
    }
