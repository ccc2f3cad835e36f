"""/v1/responses over HTTP and with OpenAI's own client, which checks the order of events."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from tests.server.harness import KEY, MODEL, Served, serving
from tests.server.scripted_runner import END

TOOL: Any = {"type": "function", "name": "lamp", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>{"name": "lamp", "arguments": {"on": true}}</tool_call>'
IMAGE = {"type": "input_image", "image_url": "data:,"}
PARSING: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


async def create(served: Served, input: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": input, "temperature": 0, **fields}
    answer = await served.post("/v1/responses", body)
    assert answer.status == 200, answer.raw
    TypeAdapter(Response).validate_python(answer.json, strict=True)
    return answer.json


async def events_of(served: Served, input: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, their framing and types checked."""
    body = {"model": MODEL, "input": input, "temperature": 0, "stream": True, **fields}
    answer = await served.post("/v1/responses", body)
    assert answer.status == 200, answer.raw
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = []
    for block in answer.raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """Ids are drawn anew, times differ, and the second of two equal prompts is cached."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        drawn = ("id", "call_id", "created_at", "completed_at", "input_tokens_details")
        return {k: without_ids(v) for k, v in value.items() if k not in drawn}
    return value


async def test_response_has_the_text_the_usage_and_the_settings(served: Served) -> None:
    body = await create(served, f"hé🙂{END}", metadata={"k": "v"}, instructions=None)

    (message,) = body["output"]
    assert message["content"][0]["text"] == "hé🙂"
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", MODEL)
    assert body["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
    }
    assert (body["temperature"], body["metadata"]) == (0, {"k": "v"})
    assert body["text"]["format"] == {"type": "text"}


async def test_stream_has_every_event_in_order_and_ends_in_the_unstreamed_response(
    served: Served,
) -> None:
    whole = await create(served, f"hé🙂{END}")
    events = await events_of(served, f"hé🙂{END}")

    kinds = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert kinds[4 + len(deltas) :] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert deltas == ["h", "é", "🙂"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[0]["response"]["status"] == "in_progress"
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {events[-1]["response"]["output"][0]["id"]}


async def test_budget_makes_the_response_incomplete(served: Served) -> None:
    body = await create(served, "abc", max_output_tokens=2)
    events = await events_of(served, "abc", max_output_tokens=2)

    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["max_output_tokens"] == 2
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(body)


async def test_silent_model_gives_an_empty_message(served: Served) -> None:
    body = await create(served, END)

    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["output"][0]["content"][0]["text"] == ""


async def test_items_reach_the_template_as_the_chat_messages_they_stand_for(
    served: Served,
) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "lamp", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
        {"role": "user", "content": END},
    ]
    counted = await served.post("/v1/responses/input_tokens", {"model": MODEL, "input": items})

    body = await create(served, items)

    assert body["output"][0]["content"][0]["text"] == "abcde"
    assert counted.json == {"object": "response.input_tokens", "input_tokens": 7}
    assert body["usage"]["input_tokens"] == 7


async def test_instructions_become_the_system_message(served: Served) -> None:
    answer = await served.post("/v1/responses", {"input": "a", "instructions": "b"})

    assert answer.error["message"].endswith("this template takes no system turn")


async def test_logprobs_come_with_the_text_they_belong_to(served: Served) -> None:
    include = ["message.output_text.logprobs"]
    body = await create(served, f"hé{END}", include=include, top_logprobs=2)
    events = await events_of(served, f"hé{END}", include=include, top_logprobs=2)

    rows = body["output"][0]["content"][0]["logprobs"]
    streamed = [
        row
        for event in events
        if event["type"] == "response.output_text.delta"
        for row in event["logprobs"]
    ]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == "hé"
    assert all(len(row["top_logprobs"]) == 2 for row in rows)
    assert streamed == rows
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == rows


async def test_calls_are_items_and_their_results_come_back() -> None:
    async with serving(**PARSING) as served:
        first = await create(served, f"I look. {CALL}{CALL}{END}", tools=[TOOL])
        events = await events_of(served, f"I look. {CALL}{CALL}{END}", tools=[TOOL])
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        second = await create(served, results, previous_response_id=first["id"])

    assert [item["type"] for item in first["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    assert first["output"][0]["content"][0]["text"].rstrip() == "I look."
    assert json.loads(first["output"][1]["arguments"]) == {"on": True}
    assert first["output"][1]["call_id"] != first["output"][2]["call_id"]
    assert without_ids(events[-1]["response"]) == without_ids(first)
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    for event in done:
        pieces = [
            e["delta"]
            for e in events
            if e["type"] == "response.function_call_arguments.delta"
            and e["item_id"] == event["item_id"]
        ]
        assert "".join(pieces) == event["arguments"]
    assert [event["name"] for event in done] == ["lamp", "lamp"]
    assert second["output"][0]["content"][0]["text"].startswith("I look. ")


async def test_reasoning_is_an_item_of_its_own_and_is_counted() -> None:
    async with serving(reasoning_parser="deepseek_r1") as served:
        body = await create(served, f"hm</think>yes{END}")
        events = await events_of(served, f"hm</think>yes{END}")

    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "yes"
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert without_ids(events[-1]["response"]) == without_ids(body)
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert deltas == ["h", "m"]


async def test_clients_stream_helper_follows_text_and_calls() -> None:
    async with (
        serving(**PARSING) as served,
        client(served) as api,
        api.responses.stream(
            model=MODEL, input=f"hé🙂 {CALL}{END}", tools=[TOOL], temperature=0
        ) as stream,
    ):
        snapshots = [
            event.snapshot async for event in stream if event.type == "response.output_text.delta"
        ]
        final = await stream.get_final_response()

    message, call = final.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert snapshots[-1] == final.output_text
    assert final.output_text.rstrip() == "hé🙂"
    assert json.loads(call.arguments) == {"on": True}


async def test_client_parses_into_a_pydantic_model(served: Served) -> None:
    class Point(BaseModel):
        x: int

    async with client(served) as api:
        format_seen = await api.responses.parse(
            model=MODEL,
            input=f'{{"x": 7}}{END}',
            temperature=0,
            text_format=Point,
        )

    assert format_seen.output_parsed == Point(x=7)
    assert served.runner.sampling_seen[-1].grammar is not None


async def test_error_inside_a_stream_is_a_failed_response(served: Served) -> None:
    served.runner.hold()
    async with client(served) as api:
        stream = await api.responses.create(model=MODEL, input="ab", stream=True)
        served.runner.fail_next = True
        served.runner.release()
        last = [event async for event in stream][-1]

    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert "forward pass" in last.response.error.message


async def test_error_before_a_stream_is_an_http_error(served: Served) -> None:
    async with client(served) as api:
        with pytest.raises(openai.NotFoundError):
            await api.responses.create(model="none", input="a", stream=True)
        with pytest.raises(openai.BadRequestError) as error:
            await api.responses.create(model=MODEL, input="a", max_output_tokens=9999, stream=True)

    assert "max_output_tokens asks for 9999" in error.value.message
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"min_p": 2}, "min_p"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_cannot_be_served_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await served.post("/v1/responses", {"model": MODEL, "input": "a", **fields})

    assert answer.status == 400
    assert answer.error["param"] == param
    assert param.split("[")[0].split(".")[0] in answer.error["message"]


async def test_fields_without_effect_are_listed(served: Served) -> None:
    body = {
        "input": f"a{END}",
        "user": "u",
        "surprise": 1,
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "seed": 3,
    }
    answer = await served.post("/v1/responses", body)

    assert answer.headers["X-Ignored-Params"].split(", ") == [
        "reasoning.encrypted_content",
        "reasoning.summary",
        "surprise",
        "text.verbosity",
        "user",
    ]


async def test_strict_tool_and_effort_reach_chat() -> None:
    strict = {**TOOL, "strict": True}
    template = "{{ messages[0].content }}{{ reasoning_effort }}"
    async with serving(**PARSING, trust_request_chat_template=True) as served:
        await create(served, f"a{END}", tools=[TOOL])
        await create(served, f"a{END}", tools=[strict])
        loose, held = (sampling.grammar for sampling in served.runner.sampling_seen)
        body = await create(served, f"a{END}", reasoning={"effort": "high"}, chat_template=template)

    assert loose is None
    assert held is not None
    assert body["usage"]["input_tokens"] == len("^a.high")


async def test_leaving_a_stream_ends_the_generation(served: Served) -> None:
    served.runner.delay_s = 0.03
    async with client(served) as api:
        stream = await api.responses.create(model=MODEL, input="ab", stream=True)
        async for event in stream:
            if not isinstance(event, ResponseCompletedEvent):
                break
        await stream.close()

    await served.wait_idle()
