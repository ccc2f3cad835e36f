"""The API's description: valid, complete, and true of real answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from llmserve.api.app import ModelInfo, make_app
from llmserve.api.description.paths import OPEN_PATHS
from llmserve.api.description.routes import ROUTES
from llmserve.config import FrontendConfig
from llmserve.tokenizer import ChatTemplate
from tests.server.harness import (
    MAX_MODEL_LEN,
    MODEL,
    TEMPLATE,
    Answer,
    BosTokenizer,
    Served,
    make_parts,
    serving,
)
from tests.server.scripted_runner import VOCAB_SIZE

in_module = pytest.mark.asyncio(loop_scope="module")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\x04'
METHODS = ("get", "post", "put", "delete", "patch")


async def document_of(served: Served) -> dict[str, Any]:
    answer = await served.get("/openapi.json")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    return dict(answer.json)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield method.upper(), path, item[method]


def check(answer: Answer, method: str, path: str, document: dict[str, Any]) -> None:
    """Status, content type and body are as described, and the body has nothing else."""
    responses = document["paths"][path][method.lower()]["responses"]
    assert str(answer.status) in responses, (answer.status, answer.raw)
    content = responses[str(answer.status)]["content"]
    media_type = answer.headers["Content-Type"].partition(";")[0]
    schema = content[media_type]["schema"]
    if media_type == "application/json":
        check_value(answer.json, schema, document)


def check_value(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    closed = copy.deepcopy(document["components"])
    for definition in closed["schemas"].values():
        if definition.get("type") == "object":
            definition.setdefault("additionalProperties", False)
    jsonschema.Draft202012Validator({**schema, "components": closed}).validate(value)


@in_module
async def test_document_is_valid(shared: Served) -> None:
    document = await document_of(shared)

    OpenAPIV31SpecValidator(document).validate()
    assert document["openapi"].startswith("3.1")


@in_module
async def test_what_is_described_is_there(shared: Served) -> None:
    document = await document_of(shared)

    described = {(method, path) for method, path, _ in operations(document)}
    assert described == set(ROUTES)
    for method, path in sorted(described):
        answer = await shared.request(method, path.replace("{id}", "x"))
        assert answer.status not in (405, 501)


def test_every_route_of_the_application_is_described() -> None:
    engine, _, _ = make_parts()
    info = ModelInfo(names=(MODEL,), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    app = make_app(engine, BosTokenizer(), ChatTemplate(TEMPLATE), FrontendConfig(), info)

    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert {route for route in routes if route[1] not in OPEN_PATHS} == set(ROUTES)


@in_module
async def test_ranges_are_in_the_schemas(shared: Served) -> None:
    schemas = (await document_of(shared))["components"]["schemas"]

    fields = schemas["CompletionRequest"]["properties"]
    number, null = fields["temperature"]["anyOf"]
    assert number == {"type": "number", "minimum": 0, "maximum": 2}
    assert null == {"type": "null"}
    assert {"type": "number", "exclusiveMinimum": 0, "maximum": 1} in fields["top_p"]["anyOf"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    assert fields["n"]["default"] == 1
    assert "anyOf" in fields["prompt"]
    assert {"type": "null"} not in fields["prompt"]["anyOf"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert schemas["ChatRequest"]["required"] == ["messages"]


@in_module
async def test_request_schemas_agree_with_the_checks(shared: Served) -> None:
    """Values that the schema allows for a field are taken, and others are refused."""
    document = await document_of(shared)
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    values: list[Any] = [None, True, 0, 1, -1, 3, 0.5, 1e9, "x", "", [], ["x"], [0], {}, {"5": 1}]
    skipped = {"model", "prompt", "max_tokens", "min_tokens", "n", "best_of", "seed", "priority"}
    depends = {"allowed_token_ids", "stop_token_ids", "logprobs", "prompt_logprobs", "suffix"}
    others = {"stream_options", "truncate_prompt_tokens", "response_format", "structured_outputs"}
    checked = set(fields) - skipped - depends - others - {"use_beam_search", "stream"}
    checked -= {name for name in fields if name.startswith("guided_")}
    assert len(checked) > 20
    for name in sorted(checked):
        validator = jsonschema.Draft202012Validator(
            {**fields[name], "components": document["components"]}
        )
        for value in values:
            answer = await shared.complete(max_tokens=1, **{"temperature": 1, name: value})
            assert (answer.status == 200) == validator.is_valid(value), (name, value, answer.raw)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2}),
        (
            "/v1/completions",
            {
                "prompt": ["abc", "d"],
                "max_tokens": 2,
                "n": 2,
                "echo": True,
                "logprobs": 2,
                "prompt_logprobs": 1,
                "return_token_ids": True,
            },
        ),
        ("/v1/completions", {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "abcd", "stop": "c"}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": "x", "model": "none"}),
        ("/v1/completions/render", {"prompt": ["abc", "d"]}),
        ("/v1/chat/completions", {"messages": "abc"}),
        (
            "/v1/chat/completions",
            {
                "messages": "abc",
                "logprobs": True,
                "top_logprobs": 2,
                "prompt_logprobs": 1,
                "return_token_ids": True,
                "n": 2,
                "max_tokens": 3,
            },
        ),
        ("/v1/chat/completions", {"messages": CALL, "tools": [TOOL], "max_tokens": 100}),
        ("/v1/chat/completions/render", {"messages": "abc", "stop": ["x"], "seed": 3}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 3}),
        ("/v1/responses", {"input": 5}),
        ("/v1/responses/input_tokens", {"input": "abc"}),
        ("/v1/messages", {"messages": "abc", "max_tokens": 3, "model": MODEL}),
        ("/v1/messages", {"messages": [], "max_tokens": 3, "model": MODEL}),
        ("/v1/messages/count_tokens", {"messages": "abc", "model": MODEL}),
        ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
        ("/tokenize", {"messages": "abc"}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [97]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
@in_module
async def test_answers_are_as_described(shared: Served, path: str, fields: dict[str, Any]) -> None:
    document = await document_of(shared)
    body = dict(fields)
    if isinstance(body.get("messages"), str):
        body["messages"] = [{"role": "user", "content": body["messages"]}]

    answer = await shared.post(path, body)

    check(answer, "POST", path, document)


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/v1/models", "/v1/models"),
        (f"/v1/models/{MODEL}", "/v1/models/{id}"),
        ("/v1/models/none", "/v1/models/{id}"),
        ("/v1/responses/none", "/v1/responses/{id}"),
        ("/v1/responses/none/input_items?limit=0", "/v1/responses/{id}/input_items"),
        ("/tokenizer_info", "/tokenizer_info"),
        ("/health", "/health"),
        ("/ping", "/ping"),
        ("/version", "/version"),
        ("/load", "/load"),
        ("/metrics", "/metrics"),
    ],
)
@in_module
async def test_answers_without_a_body_are_as_described(
    shared: Served, path: str, template: str
) -> None:
    check(await shared.get(path), "GET", template, await document_of(shared))


@in_module
async def test_stored_response_is_as_described(shared: Served) -> None:
    document = await document_of(shared)
    made = (await shared.post("/v1/responses", {"input": "abc", "max_output_tokens": 3})).json

    path = f"/v1/responses/{made['id']}"
    check(await shared.get(path), "GET", "/v1/responses/{id}", document)
    items = await shared.get(f"{path}/input_items")
    check(items, "GET", "/v1/responses/{id}/input_items", document)
    deleted = await shared.request("DELETE", path)
    check(deleted, "DELETE", "/v1/responses/{id}", document)


@pytest.mark.parametrize(
    ("path", "chunk", "fields"),
    [
        (
            "/v1/completions",
            "CompletionChunk",
            {"prompt": "abc", "logprobs": 1, "return_token_ids": True},
        ),
        ("/v1/chat/completions", "ChatCompletionChunk", {"messages": "abc", "logprobs": True}),
        ("/v1/chat/completions", "ChatCompletionChunk", {"messages": CALL, "tools": [TOOL]}),
    ],
)
@in_module
async def test_events_are_as_described(
    shared: Served, path: str, chunk: str, fields: dict[str, Any]
) -> None:
    document = await document_of(shared)
    body = {**fields, "stream": True, "max_tokens": 80, "stream_options": {"include_usage": True}}
    if "messages" in fields:
        body["messages"] = [{"role": "user", "content": fields["messages"]}]

    answer = await shared.post(path, body)

    check(answer, "POST", path, document)
    for event in answer.events:
        check_value(event, {"$ref": f"#/components/schemas/{chunk}"}, document)


async def test_keys_are_described_where_they_are_needed() -> None:
    async with serving(api_key=("k",)) as served:
        served.session.headers.pop("Authorization")
        document = await document_of(served)

        OpenAPIV31SpecValidator(document).validate()
        for method, path, operation in operations(document):
            is_open = operation.get("security") == []
            answer = await served.request(method, path.replace("{id}", "x"))
            assert (answer.status == 401) == (not is_open)
            assert ("401" in operation["responses"]) == (not is_open)


@in_module
async def test_page_needs_nothing_from_elsewhere(shared: Served) -> None:
    page = await shared.get("/docs")

    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    text = page.raw.decode()
    assert "http://" not in text
    assert "https://" not in text
    for name, kind in (
        ("swagger-ui.css", "text/css"),
        ("swagger-ui-bundle.js", "javascript"),
    ):
        assert f"docs/{name}" in text
        answer = await shared.get(f"/docs/{name}")
        assert answer.status == 200
        assert kind in answer.headers["Content-Type"]
        assert len(answer.raw) > 100_000


async def test_description_can_be_switched_off() -> None:
    async with serving(disable_fastapi_docs=True) as served:
        for path in ("/openapi.json", "/docs", "/docs/swagger-ui.css"):
            answer = await served.get(path)
            assert answer.status == 404
            assert json.loads(answer.raw)["error"]["type"] == "invalid_request_error"
