"""Fields of chat in the other APIs, taken or refused by name; fields that are listed as void."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MODEL, Answer, Served, serving
from tests.server.scripted_runner import END

FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
KWARGS: dict[str, Any] = {
    "chat_template": "{{ messages[0].content }}{{ more }}",
    "chat_template_kwargs": {"more": "abc"},
}


async def respond(served: Served, text: str, path: str = "", **fields: Any) -> Answer:
    body = {"model": MODEL, "input": text, "temperature": 0, **fields}
    if path:
        del body["temperature"]
    return await served.post(f"/v1/responses{path}", body)


async def write(served: Served, text: str, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "max_tokens": 20, "temperature": 0, "messages": messages, **fields}
    return await served.post("/v1/messages", body)


async def count(served: Served, text: str, **fields: Any) -> Answer:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    return await served.post("/v1/messages/count_tokens", body)


@pytest.mark.parametrize(
    "fields", [{"guided_regex": "x+"}, {"guided_choice": ["a"]}, {"guided_json": {}}]
)
@pytest.mark.parametrize("send", [respond, write])
async def test_older_grammar_fields_are_enforced(
    served: Served, send: Any, fields: dict[str, Any]
) -> None:
    answer = await send(served, f"1{END}", **fields)

    assert answer.status == 200, answer.raw
    assert "X-Ignored-Params" not in answer.headers
    assert served.runner.sampling_seen[-1].grammar is not None


async def test_responses_end_at_a_stop_string(served: Served) -> None:
    answer = await respond(served, f"one, two{END}", stop=[","])

    assert answer.json["status"] == "completed"
    assert answer.json["output"][0]["content"][0]["text"] == "one"


async def test_output_format_beside_output_config_is_the_same(served: Served) -> None:
    answer = await write(served, f"{{}}{END}", output_format=FORMAT)
    both = await write(served, "a", output_format=FORMAT, output_config={"format": FORMAT})
    wrong = await write(served, "a", output_format={"type": "text"})

    assert answer.json["content"][0]["text"] == "{}"
    assert served.runner.sampling_seen[-1].grammar is not None
    assert [both.status, wrong.status] == [400, 400]
    assert "output_config.format" in both.json["error"]["message"]
    assert "output_format" in wrong.json["error"]["message"]


@pytest.mark.parametrize(
    ("send", "field", "value", "own_name"),
    [
        (respond, "messages", [], "input"),
        (respond, "max_tokens", 5, "max_output_tokens"),
        (respond, "response_format", {"type": "json_object"}, "text.format"),
        (respond, "reasoning_effort", "low", "reasoning.effort"),
        (respond, "logprobs", True, "include"),
        (write, "stop", ["a"], "stop_sequences"),
        (write, "max_completion_tokens", 5, "max_tokens"),
        (write, "response_format", {"type": "json_object"}, "output_config.format"),
    ],
)
async def test_what_is_called_otherwise_is_refused_with_its_name(
    served: Served, send: Any, field: str, value: Any, own_name: str
) -> None:
    answer = await send(served, "a", **{field: value})

    assert answer.status == 400
    message = answer.json["error"]["message"]
    assert message == f"{field} is called {own_name} in this API; use that"


async def test_counted_prompt_is_the_one_that_runs() -> None:
    async with serving(trust_request_chat_template=True) as served:
        run = await respond(served, f"a{END}", **KWARGS)
        counted = await respond(served, f"a{END}", "/input_tokens", **KWARGS)

    assert counted.json["input_tokens"] == run.json["usage"]["input_tokens"]


async def test_variables_that_no_template_reads_are_listed(served: Served) -> None:
    variables = {"suffix": "", "my_switch": True, "([a-z]+)+$": 1, "prefix": None}
    chat = await served.chat(f"a{END}", chat_template_kwargs=variables)
    message = await write(served, f"a{END}", thinking={"type": "adaptive"})

    assert chat.headers["X-Ignored-Params"] == "chat_template_kwargs.my_switch"
    assert "X-Ignored-Params" not in message.headers


async def test_list_of_fields_without_effect_has_room_in_a_header(served: Served) -> None:
    variables = {f"variable_{i}": i for i in range(1000)}
    answer = await served.chat(f"a{END}", chat_template_kwargs=variables)

    names = answer.headers["X-Ignored-Params"].split(", ")
    assert len(answer.headers["X-Ignored-Params"]) < 4100
    assert names[0] == "chat_template_kwargs.variable_0"
    assert names[-1] == "..."


async def test_fields_of_templates_are_listed_beside_a_text_to_tokenize(served: Served) -> None:
    fields = {"add_generation_prompt": True, "tools": [], "documents": None}
    answer = await served.post("/tokenize", {"prompt": "a", **fields})

    assert answer.headers["X-Ignored-Params"] == "add_generation_prompt, tools"


async def test_counts_list_fields_without_effect() -> None:
    fields = {"surprise": 1, "seed": 3}
    async with serving() as served:
        listed = [
            await respond(served, "a", "/input_tokens", **fields),
            await count(served, "a", **fields),
        ]
    async with serving(strict_params=True) as strict:
        refused = [
            await respond(strict, "a", "/input_tokens", **fields),
            await count(strict, "a", **fields),
        ]

    assert [a.headers["X-Ignored-Params"] for a in listed] == ["seed, surprise"] * 2
    assert [answer.status for answer in refused] == [400, 400]
