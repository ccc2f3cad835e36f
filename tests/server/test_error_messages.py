"""What an error blames: the item of a list, the tool among tools, the part of a schema."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MODEL, Served, serving
from tests.server.scripted_runner import END

FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "a"}]


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": name}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", 5]}, "stop[1] is 5; it must be a string that is not empty"),
        ({"stop": ["a", ""]}, 'stop[1] is ""; it must be a string that is not empty'),
        ({"stop": ""}, 'stop is ""; it must be a string that is not empty'),
        ({"bad_words": ["a", None]}, "bad_words[1] is null; it must be a string that is not empty"),
        (
            {"guided_choice": ["a", 5]},
            "guided_choice[1] is 5; it must be a string that is not empty",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice is a list of 0; it must be a list of at least one string "
            "that is not empty",
        ),
        (
            {"stop_token_ids": [5, "a"]},
            'stop_token_ids[1] is "a"; it must be a token id (an integer)',
        ),
        (
            {"stop_token_ids": [5, 6, 258]},
            "stop_token_ids[2] is 258; it must be a token id from 0 to 257",
        ),
        ({"documents": [{}, 5]}, "documents[1] is 5; it must be an object"),
        ({"stream_options": 5}, "stream_options is 5; it must be an object"),
        ({"tools": [{"type": "browser"}]}, 'tools[0].type is "browser"; it must be function'),
        (
            {"tools": [tool("f", parameters={"type": "string"})]},
            'tools[0].function.parameters.type is "string"; it must be object',
        ),
        (
            {"tools": [tool("f", parameters={"properties": []})]},
            "tools[0].function.parameters.properties is a list of 0; it must be an object",
        ),
    ],
)
async def test_message_names_what_is_wrong(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    answer = await served.chat(**fields)

    assert answer.status == 400
    assert answer.error["message"] == message
    assert answer.error["param"] == message.split(" is ")[0]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/detokenize", {"tokens": [1, True]}, "tokens[1] is true; it must be a token id"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1] is -1; it must be a token id from 0"),
        ("/v1/completions", {"prompt": [1, 258]}, "prompt[1] is 258; it must be a token id"),
        ("/v1/completions", {"prompt": [[1], [2, 258]]}, "prompt[1][1] is 258; it must be a"),
        ("/v1/completions", {"prompt": [[1], [2, "a"]]}, 'prompt[1][1] is "a"; it must be a'),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt[1] is an empty list"),
        (
            "/v1/responses",
            {"input": "a", "include": ["reasoning.encrypted_content", "x"]},
            'include[1] is "x"; it must be one of',
        ),
        ("/v1/responses", {"input": "a", "stop": ["a", 5]}, "stop[1] is 5; it must be a string"),
        ("/v1/responses", {"input": "a", "stop": 5}, "stop is 5; it must be a string or a list"),
    ],
)
async def test_wrong_item_of_a_list_is_named(
    served: Served, path: str, fields: dict[str, Any], message: str
) -> None:
    answer = await served.post(path, {"model": MODEL, **fields})

    assert answer.status == 400
    assert answer.error["message"].startswith(message)
    assert answer.error["param"] == message.split(" is ")[0]


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": FORMAT}])
async def test_tool_whose_schema_cannot_be_enforced_is_named(fields: dict[str, Any]) -> None:
    tools = [tool("f", parameters=kind("string")), tool("g", parameters=kind("nope"))]
    async with serving(enable_auto_tool_choice=True, tool_call_parser="hermes") as served:
        answer = await served.chat(tools=tools, **fields)

    assert answer.status == 400
    assert answer.error["param"] == "tools[1].function.parameters"
    assert "nope" in answer.error["message"]


async def test_response_format_is_not_blamed_on_tools() -> None:
    format = {"type": "json_schema", "json_schema": {"schema": kind("nope")}}
    tools = [tool("f", parameters=kind("string"))]
    async with serving(enable_auto_tool_choice=True, tool_call_parser="hermes") as served:
        answer = await served.chat(tools=tools, response_format=format)

    assert answer.status == 400
    assert answer.error["param"] == "response_format"


async def test_whitespace_that_is_no_pattern_is_named(served: Served) -> None:
    outputs = {"json": {"type": "object"}, "whitespace_pattern": "["}
    answer = await served.chat(structured_outputs=outputs)

    assert answer.status == 400
    assert "the whitespace pattern '['" in answer.error["message"]


async def test_type_of_a_messages_api_schema_is_named(served: Served) -> None:
    tools = [{"name": "f", "input_schema": {"type": "string"}}]
    body = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES, "tools": tools}
    answer = await served.post("/v1/messages", body)

    message = answer.json["error"]["message"]
    assert message == 'tools[0].input_schema.type is "string"; it must be object'


async def test_empty_name_of_a_model_is_no_name(served: Served) -> None:
    answer = await served.chat(f"a{END}", model="")

    assert answer.status == 200
    assert answer.json["model"] == MODEL
