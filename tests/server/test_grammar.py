"""Structured outputs of a real model behind a real server: what is asked for is what comes back.

The demo model is small and, at these temperatures, writes nonsense; only the grammars make it
valid.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from blockbuster import BlockBuster
from pydantic import BaseModel

from llmserve.files.demo import demo_model_path
from tests.e2e.server_process import ServerProcess
from tests.server.harness import Served, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "ü", 3, None]},
        "on": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"},
        "deep": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
            "required": ["list"],
        },
    },
    "required": ["kind", "on", "code", "deep"],
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 2, "maxItems": 5},
    {"type": "integer", "minimum": 10, "maximum": 99999},
    {"anyOf": [{"type": "boolean"}, {"const": {"a": [1]}}]},
    {"type": "string", "format": "date-time"},
    {"type": "string", "maxLength": 8},
    {"$ref": "#/$defs/n", "$defs": {"n": {"enum": [{"日本": None}]}}},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Few blocks: eight long requests at once make it preempt some."""
    process = ServerProcess(
        *("--model", str(demo_model_path(print)), "--port", "0", "--max-model-len", "512"),
        *("--chat-template", TEMPLATE, "--num-gpu-blocks-override", "40", "--prepare-grammars"),
    )
    process.wait_ready()
    yield process
    process.terminate()
    process.wait()


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as session:
        yield session


def chat_body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Fill in the form."}]
    return {"messages": messages, "max_tokens": 200, "temperature": 1.3, "seed": 1} | fields


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **fields}}


async def chat(client: httpx.AsyncClient, **fields: Any) -> list[str]:
    """The texts of all choices; each must have ended by itself."""
    response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert {choice["stop_reason"] for choice in choices} == {None}
    return [choice["message"]["content"] for choice in choices]


async def complete(client: httpx.AsyncClient, **fields: Any) -> str:
    body = {"prompt": "City:", "max_tokens": 200, "temperature": 1.3, "seed": 1} | fields
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


async def refused(client: httpx.AsyncClient, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = chat_body(**fields) if path == CHAT else {"prompt": "a", **fields}
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_documents_are_valid_and_end_at_a_high_temperature(
    client: httpx.AsyncClient,
) -> None:
    for seed in range(4):
        (text,) = await chat(client, response_format=json_schema(PERSON), seed=seed)
        jsonschema.validate(json.loads(text), PERSON)


async def test_eight_grammars_at_once_with_preemption(
    server: ServerProcess, client: httpx.AsyncClient
) -> None:
    long = {"type": "array", "items": SCHEMAS[1], "minItems": 12, "maxItems": 12}
    before = server.metric("num_preemptions_total")

    async def run(schema: dict[str, Any]) -> None:
        fields = {"response_format": json_schema(schema), "max_tokens": 300}
        for text in await chat(client, **fields):
            jsonschema.validate(json.loads(text), schema)

    await asyncio.gather(*map(run, SCHEMAS), *(run(long) for _ in range(4)))

    assert server.metric("num_preemptions_total") > before


async def test_each_choice_follows_the_grammar_on_its_own(client: httpx.AsyncClient) -> None:
    texts = await chat(client, response_format=json_schema(PERSON), n=4)

    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


async def test_plain_requests_beside_are_what_they_are_alone(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    body = {"prompt": "Plain text:", **fields}
    alone = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]

    results = await asyncio.gather(
        client.post(COMPLETIONS, json=body),
        *(chat(client, response_format=json_schema(schema)) for schema in SCHEMAS),
    )

    assert results[0].json()["choices"][0]["text"] == alone


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[A-Z]{3}-\\d{2}"}}, "[A-Z]{3}-[0-9]{2}"),
        ({"guided_regex": "a+b"}, "a+b"),
        ({"structured_outputs": {"choice": ["Zürich", "東京", "x y"]}}, "Zürich|東京|x y"),
        ({"guided_choice": ["yes", "yes!"]}, "yes!?"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [ab]{2,3} ">"'}}, "<[ab]{2,3}>"),
        ({"guided_grammar": "start: /[xy]{2}/"}, "[xy]{2}"),
        ({"structured_outputs": {"json": {"enum": ["ü", 1]}}}, '"ü"|1'),
        ({"structured_outputs": {"json": '{"const": [1, 2]}'}}, "\\[\\s?1\\s?,\\s?2\\s?\\]"),
        ({"guided_json": {"const": [1, 2]}}, "\\[\\s?1\\s?,\\s?2\\s?\\]"),
        ({"guided_json": {"const": [1, 2]}, "guided_whitespace_pattern": " "}, "\\[ ?1 ?, ?2 ?\\]"),
        (
            {"structured_outputs": {"json": {"const": [1, 2]}, "disable_any_whitespace": True}},
            "\\[1,2\\]",
        ),
        (
            {"structured_outputs": {"json": {"const": [1, 2]}, "whitespace_pattern": "\\n{0,2}"}},
            "\\[\\n{0,2}1\\n{0,2},\\n{0,2}2\\n{0,2}\\]",
        ),
        ({"response_format": json_schema({"type": "boolean"}, strict=True)}, "true|false"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "tag", "begin": "<i>", "end": "</i>"}
                    | {"content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}},
                }
            },
            "<i>[12]</i>",
        ),
    ],
)
async def test_every_field_constrains_both_endpoints(
    client: httpx.AsyncClient, fields: dict[str, Any], pattern: str
) -> None:
    (answer,) = await chat(client, **fields)
    text = await complete(client, **fields)

    assert re.fullmatch(pattern, answer), answer
    assert re.fullmatch(pattern, text), text


async def test_json_object_is_an_object(client: httpx.AsyncClient) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        response = await client.post(CHAT, json=chat_body(**fields, max_tokens=60))
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


async def test_streamed_text_equals_the_unstreamed_one(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        body: Any = chat_body(response_format=json_schema(PERSON)) | {"model": None}
        body["model"] = (await client.models.list()).data[0].id
        whole = await client.chat.completions.create(**body)
        stream = await client.chat.completions.create(**body, stream=True)
        pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]

    assert "".join(pieces) == whole.choices[0].message.content


async def test_openai_client_parses_into_models(server: ServerProcess) -> None:
    class Answer(BaseModel):
        verdict: bool
        tags: list[bool]

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = await client.chat.completions.parse(
            model=(await client.models.list()).data[0].id,
            messages=[{"role": "user", "content": "Is it?"}],
            response_format=Answer,
            max_tokens=300,
        )

    parsed = answer.choices[0].message.parsed
    assert parsed is None or isinstance(parsed.verdict, bool)
    assert parsed is not None or answer.choices[0].finish_reason == "length"


async def test_logprobs_are_those_of_the_unconstrained_model(client: httpx.AsyncClient) -> None:
    """The first token of a document is none that this model would choose."""
    body = chat_body(
        response_format=json_schema(PERSON), logprobs=True, top_logprobs=3, temperature=0
    )
    answer = (await client.post(CHAT, json=body)).json()["choices"][0]

    first = answer["logprobs"]["content"][0]
    assert first["token"].startswith("{")
    assert first["token"] not in [row["token"] for row in first["top_logprobs"]]
    assert -100 < first["logprob"] < first["top_logprobs"][-1]["logprob"]


async def test_complete_document_ends_whatever_asks_for_more(client: httpx.AsyncClient) -> None:
    short = {"structured_outputs": {"choice": ["ab"]}}

    assert await complete(client, **short, min_tokens=50) == "ab"
    assert await complete(client, **short, ignore_eos=True) == "ab"
    longest = {"structured_outputs": {"regex": "[ab]{1,20}"}, "ignore_eos": True}
    assert len(await complete(client, **longest)) == 20


async def test_stop_strings_still_cut(client: httpx.AsyncClient) -> None:
    text = await complete(client, structured_outputs={"regex": "abcdef"}, stop="d")

    assert text == "abc"


async def test_cancelled_request_leaves_nothing_behind(
    server: ServerProcess, client: httpx.AsyncClient
) -> None:
    long = {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 5000}
    body = chat_body(response_format=json_schema(long), stream=True, max_tokens=400)

    async with client.stream("POST", CHAT, json=body) as response:
        async for _ in response.aiter_lines():
            break

    for _ in range(1000):
        if server.metric("num_requests_running") == 0:
            break
        await asyncio.sleep(0.02)
    assert server.metric("num_requests_running") == 0
    assert await complete(client, structured_outputs={"choice": ["ok"]}) == "ok"


async def test_choice_whose_tokens_are_all_banned_is_the_callers_fault(
    client: httpx.AsyncClient,
) -> None:
    fields = {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]}

    for path in (CHAT, COMPLETIONS):
        error = await refused(client, path, **fields)
        assert "no token is left to sample" in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": json_schema({"type": "strnig"})}, "response_format", "strnig"),
        ({"response_format": json_schema({"uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"response_format": json_schema({"$ref": "#/$defs/x"})}, "response_format", "/$defs/x"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": json_schema({}, strict=1)}, "strict", "a boolean"),
        ({"response_format": json_schema({}, name=5)}, "name", "a string"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "\\"}}, "structured_outputs.regex", "escapes nothing"),
        ({"structured_outputs": {"regex": "a{1000000}"}}, "outputs.regex", "too complex"),
        ({"structured_outputs": {"choice": ["x" * 900_000]}}, "outputs.choice", "too complex"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "not"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "not empty"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "outputs.choice[1]", "a string"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "uses x"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of them"),
        ({"structured_outputs": {"nonsense": 1}}, "structured_outputs", "nonsense"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "json or json_object only",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}},
            "structured_outputs",
            "whitespace",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both constrain",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both constrain"),
    ],
)
async def test_what_cannot_be_enforced_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    for path in (CHAT, COMPLETIONS):
        error = await refused(client, path, **fields)
        assert param in error["param"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"


async def test_text_and_empty_settings_constrain_nothing(client: httpx.AsyncClient) -> None:
    fields = {
        "response_format": {"type": "text"},
        "structured_outputs": {"json": None, "json_object": False, "disable_fallback": True},
        "guided_json": None,
    }
    response = await client.post(CHAT, json=chat_body(**fields, max_tokens=5))

    assert response.status_code == 200, response.text


async def test_grammar_is_compiled_away_from_the_event_loop(
    served: Served, blockbuster: BlockBuster
) -> None:
    """Waiting on the loop for the compiler's thread would fail this test."""
    slow = json_schema({"type": "integer", "multipleOf": 9973})
    served.runner.hold()

    request = asyncio.create_task(served.chat(response_format=slow))
    await wait_for(lambda: served.engine.num_unfinished > 0)
    request.cancel()

    assert blockbuster
