"""The OpenAPI 3.1 document, made of the request and answer models.

A pure function of the routes and of whether there are API keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llmserve import __version__
from llmserve.api.description.answers import Error
from llmserve.api.description.other_answers import AnthropicError
from llmserve.api.description.routes import ROUTES, RouteDescription
from llmserve.api.error_body import is_anthropic

Schema = dict[str, Any]
Refs = dict[Any, Schema]  # by model

_OF_ALL = (500,)
_OF_KEYS = (401,)
_OF_PATHS = (400, 404)
_OF_BODIES = (400, 404, 408, 413, 415)
_OF_GENERATIONS = (429, 503)

_REASONS = {
    400: "A field is missing or wrong; the message names it, its value and what is allowed.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing, for example no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests; try again later.",
    500: "The server failed; its log has the cause under the request id.",
    503: "The server takes no requests now; try again later.",
}
_REQUEST_ID = {"X-Request-Id": {"description": "the id in the log", "schema": {"type": "string"}}}
_IGNORED = {
    "X-Ignored-Params": {
        "description": "fields of the request that had no effect",
        "schema": {"type": "string"},
    }
}
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")


def build_document(routes: Iterable[tuple[str, str]], *, has_keys: bool) -> Schema:
    """The description of the given routes, by method and path; others are left out."""
    described = {route: ROUTES[route] for route in routes if route in ROUTES}
    refs, definitions = _make_schemas(described.values())
    paths: dict[str, Schema] = {}
    for (method, path), description in described.items():
        operation = _operation(method, path, description, refs, has_keys=has_keys)
        paths.setdefault(path, {})[method.lower()] = operation
    components: Schema = {"schemas": definitions}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "llmserve",
            "version": __version__,
            "description": "An LLM inference server with an OpenAI-compatible API. In requests "
            "null means absent, and fields that are not listed are ignored and named in the "
            "header X-Ignored-Params, unless the server runs with --strict-params.",
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"key": []}]
    return document


def _make_schemas(descriptions: Iterable[RouteDescription]) -> tuple[Refs, dict[str, Schema]]:
    """References to the schemas of all models, and the schemas by name."""
    answers: set[type[BaseModel]] = {Error, AnthropicError}
    requests: set[type[BaseModel]] = set()
    for description in descriptions:
        answers |= {m for m in (description.answer, description.chunk) if m is not None}
        if description.request is not None:
            requests.add(description.request)
    models = sorted(answers | requests, key=lambda model: (model.__module__, model.__qualname__))
    refs, whole = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    definitions: dict[str, Schema] = whole["$defs"]
    for model in requests:
        name = refs[model, "validation"]["$ref"].rpartition("/")[2]
        _allow_null(definitions[name])
    return {model: ref for (model, _), ref in refs.items()}, definitions


def _allow_null(schema: Schema) -> None:
    """Null means absent in every field that may be absent; so do the defaults None and ()."""
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if field.get("default") in (None, []):
            field.pop("default", None)
        variants = field.get("anyOf", [field])
        if name in required or {"type": "null"} in variants:
            continue
        kept = {key: field.pop(key) for key in ("title", "default", "description") if key in field}
        schema["properties"][name] = {"anyOf": [*variants, {"type": "null"}], **kept}


def _operation(
    method: str, path: str, description: RouteDescription, refs: Refs, *, has_keys: bool
) -> Schema:
    operation: Schema = {
        "operationId": _operation_id(method, path),
        "summary": description.summary,
        "tags": [description.tag],
        "responses": {
            "200": _success(description, refs),
            **_errors(path, description, refs, has_keys=has_keys),
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(path)
    ]
    parameters += [
        {"name": q.name, "in": "query", "schema": q.schema, "description": q.description}
        for q in description.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if description.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[description.request]}},
        }
    if has_keys and description.is_open:
        operation["security"] = []
    return operation


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"\w+", path)
    return "_".join([method.lower(), *words])


def _success(description: RouteDescription, refs: Refs) -> Schema:
    if description.answer is None:
        content: Schema = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": refs[description.answer]}}
    success: Schema = {"description": "The answer", "headers": dict(_REQUEST_ID)}
    if description.chunk is not None:
        content["text/event-stream"] = {"schema": _event(refs[description.chunk])}
        success["headers"] |= _IGNORED
    success["content"] = content
    return success


def _event(chunk: Schema) -> Schema:
    """An event of a stream, in the form in which OpenAPI 3.2 describes server-sent events."""
    data = {
        "type": "string",
        "description": "with stream: one such object per event; [DONE] ends OpenAI's streams",
        "contentMediaType": "application/json",
        "contentSchema": chunk,
    }
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }


def _errors(
    path: str, description: RouteDescription, refs: Refs, *, has_keys: bool
) -> dict[str, Schema]:
    statuses = {*_OF_ALL, *description.extra_statuses}
    if has_keys and not description.is_open:
        statuses |= set(_OF_KEYS)
    if _PATH_PARAMETER.search(path) or description.query:
        statuses |= set(_OF_PATHS)
    if description.request is not None:
        statuses |= {*_OF_BODIES, *_OF_GENERATIONS}
    model = AnthropicError if is_anthropic(path) else Error
    return {
        str(status): {
            "description": _REASONS[status],
            "headers": dict(_REQUEST_ID),
            "content": {"application/json": {"schema": refs[model]}},
        }
        for status in sorted(statuses)
    }
