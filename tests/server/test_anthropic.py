"""/v1/messages over HTTP and with Anthropic's own client, which follows the events of a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent, TextBlock, ToolUseBlock
from pydantic import TypeAdapter

from llmserve.api.anthropic.blocks import check_messages, to_chat
from llmserve.api.anthropic.output import Content
from tests.server.harness import KEY, MODEL, Answer, Served, serving
from tests.server.scripted_runner import END

TOOL: Any = {"name": "lamp", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "lamp", "arguments": {"on": true}}</tool_call>'
PARSING: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def client(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=KEY, max_retries=0)


async def send(served: Served, text: str = f"hé🙂{END}", **fields: Any) -> Answer:
    body = {
        "model": MODEL,
        "max_tokens": 200,
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }
    return await served.post("/v1/messages", body)


async def create(served: Served, text: str = f"hé🙂{END}", **fields: Any) -> dict[str, Any]:
    answer = await send(served, text, **fields)
    assert answer.status == 200, answer.raw
    TypeAdapter(Message).validate_python(answer.json, strict=True)
    return answer.json


def events_in(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, their framing and types checked; pings are left out."""
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "ping":
            continue
        if event["type"] != "error":
            EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def error_in(answer: Answer) -> dict[str, Any]:
    """The error object, its shape checked."""
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["request-id"]
    assert set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) == {"type", "message"}
    return answer.json["error"]


async def test_message_has_text_and_usage(served: Served) -> None:
    body = await create(served)

    assert body["content"] == [{"type": "text", "text": "hé🙂", "citations": None}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (9, 8)


async def test_stream_has_every_event_in_order(served: Served) -> None:
    events = events_in((await send(served, stream=True)).raw)

    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 9
    assert [event["delta"]["text"] for event in events[2:5]] == ["h", "é", "🙂"]
    assert events[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[6]["usage"]["output_tokens"] == 8


async def test_cached_tokens_are_not_input_tokens(served: Served) -> None:
    text = "x" * 40 + END
    first = (await create(served, text))["usage"]
    second = (await create(served, text))["usage"]
    events = events_in((await send(served, text, stream=True)).raw)

    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == 32
    assert second["input_tokens"] + 32 == first["input_tokens"]
    assert events[-2]["usage"] == second


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zz", "c"]}, "stop_sequence", "c"),
        ({}, "end_turn", None),
    ],
    ids=["max_tokens", "stop_sequence", "end_turn"],
)
async def test_stop_reason_is_named_streamed_and_not(
    served: Served, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    whole = await create(served, f"abcd{END}", **fields)
    events = events_in((await send(served, f"abcd{END}", stream=True, **fields)).raw)

    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_client_streams_text(served: Served) -> None:
    async with (
        client(served) as api,
        api.messages.stream(
            model=MODEL,
            max_tokens=50,
            messages=[{"role": "user", "content": f"hé🙂{END}"}],
            extra_body={"temperature": 0},
        ) as stream,
    ):
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert "".join(texts) == final.content[0].text == "hé🙂"  # type: ignore[union-attr]
    assert final.usage.output_tokens == 8


async def test_synchronous_client(served: Served) -> None:
    def ask() -> tuple[str, str, int]:
        with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as api:
            fields: Any = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"hé🙂{END}"}],
            }
            more: Any = {"max_tokens": 50, "extra_body": {"temperature": 0}}
            whole = api.messages.create(**fields, **more)
            with api.messages.stream(**fields, **more) as stream:
                text = stream.get_final_text()
            count = api.messages.count_tokens(**fields).input_tokens
            assert isinstance(whole.content[0], TextBlock)
            return whole.content[0].text, text, count

    assert await asyncio.to_thread(ask) == ("hé🙂", "hé🙂", 9)


async def test_tool_use_and_its_result_make_the_round_trip() -> None:
    async with serving(**PARSING) as served, client(served) as api:
        ask: Any = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}
        question: Any = {"role": "user", "content": f"I look. {CALL}{CALL}{END}"}
        first = await api.messages.create(messages=[question], tools=[TOOL], **ask)
        async with api.messages.stream(messages=[question], tools=[TOOL], **ask) as stream:
            streamed = await stream.get_final_message()
        uses = [block for block in first.content if isinstance(block, ToolUseBlock)]
        results: Any = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "ok"} for use in uses
        ]
        second = await api.messages.create(
            messages=[
                question,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [*results, {"type": "text", "text": END}]},
            ],
            **ask,
        )

    assert first.stop_reason == streamed.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert [use.input for use in uses] == [{"on": True}] * 2
    for whole, piece in zip(first.content, streamed.content, strict=True):
        assert whole.model_dump(exclude={"id"}) == piece.model_dump(exclude={"id", "parsed_output"})
    assert second.content[0].text.startswith("I look. ")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("thinking", "kinds", "kwarg"),
    [
        (None, ["thinking", "text"], None),
        ({"type": "enabled", "budget_tokens": 50}, ["thinking", "text"], "on"),
        ({"type": "adaptive", "display": "omitted"}, ["text"], "on"),
        ({"type": "disabled"}, ["text"], "off"),
    ],
    ids=["default", "enabled", "omitted", "disabled"],
)
async def test_thinking_is_shown_as_asked_and_told_to_the_template(
    thinking: Any, kinds: list[str], kwarg: str | None
) -> None:
    template = (
        "{{ messages[-1].content }}{% if enable_thinking is defined %}"
        "{{ 'on' if enable_thinking else 'off' }}{% endif %}"
    )
    async with serving(reasoning_parser="deepseek_r1", trust_request_chat_template=True) as served:
        text = f"hm</think>yes{END}"
        body = await create(served, text, thinking=thinking, chat_template=template)

    assert [block["type"] for block in body["content"]] == kinds
    assert body["content"][-1]["text"] == "yes"
    assert body["usage"]["input_tokens"] == 1 + len(text) + len(kwarg or "")


async def test_thinking_budget_without_a_reasoning_parser_is_listed(served: Served) -> None:
    answer = await send(served, thinking={"type": "enabled", "budget_tokens": 50})

    assert answer.status == 200
    assert answer.headers["X-Ignored-Params"] == "thinking.budget_tokens"


async def test_variables_of_the_template_beside_thinking_are_checked(served: Served) -> None:
    thinking = {"type": "enabled", "budget_tokens": 50}

    answer = await send(served, thinking=thinking, chat_template_kwargs=[1])

    assert answer.status == 400
    assert "chat_template_kwargs is a list of 1" in answer.json["error"]["message"]


def test_blocks_become_the_chat_messages_they_stand_for() -> None:
    messages = check_messages(
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "ü"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "is_error": True},
                    {"type": "text", "text": "d"},
                ],
            },
        ],
        "messages",
    )

    assert to_chat(["s1", "s2"], messages) == [
        {
            "role": "system",
            "content": [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": "c",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x":"ü"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "", "is_error": True},
        {"role": "user", "content": "d"},
    ]


def test_thinking_ends_with_a_signature_before_the_text_begins() -> None:
    def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {"choices": [choice], "usage": None}

    content = Content()
    chunks = [chunk(reasoning="h"), chunk(reasoning="m"), chunk(content="yes"), chunk("stop")]
    events = [event for item in chunks for event in content.add(item)] + content.finish()

    for event in events:
        EVENT.validate_python(event, strict=True)
    deltas = [event["delta"]["type"] for event in events if "delta" in event]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    assert [event["index"] for event in events] == [0, 0, 0, 0, 0, 1, 1, 1]
    thinking, text = content.blocks
    assert thinking["thinking"] == "hm"
    assert thinking["signature"] == events[3]["delta"]["signature"] != ""
    assert text["text"] == "yes"


def test_turn_of_results_alone_adds_no_empty_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "ok"}
    messages = check_messages([{"role": "user", "content": [result]}], "messages")

    assert to_chat([], messages) == [{"role": "tool", "tool_call_id": "1", "content": "ok"}]


async def test_one_call_alone_where_parallel_use_is_disabled() -> None:
    async with serving(**PARSING) as served:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        body = await create(served, f"{CALL}{CALL}{END}", tools=[TOOL], tool_choice=choice)

    assert [block["type"] for block in body["content"]] == ["tool_use"]


async def test_output_format_becomes_a_grammar(served: Served) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    body = await create(served, f"{{}}{END}", output_config={"format": format})

    assert body["content"][0]["text"] == "{}"
    assert served.runner.sampling_seen[-1].grammar is not None


async def test_last_turn_of_the_assistant_is_continued() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}NEW{% endif %}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{END}"}]
    ask = {"model": MODEL, "messages": turns, "chat_template": template}
    async with serving(trust_request_chat_template=True) as served:
        body = await create(served, messages=turns, chat_template=template)
        count = await served.post("/v1/messages/count_tokens", ask)

    assert body["content"][0]["text"] == "ab"
    assert count.json == {"input_tokens": 4}


async def test_system_prompt_reaches_the_template(served: Served) -> None:
    error = error_in(await send(served, system=[{"type": "text", "text": "b"}]))

    assert error["message"].endswith("this template takes no system turn")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "z"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": [str(i) for i in range(17)]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_cannot_be_served_is_refused_by_name(
    served: Served, fields: dict[str, Any], field: str
) -> None:
    answer = await send(served, **fields)

    assert answer.status == 400
    error = error_in(answer)
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


async def test_errors_become_the_clients_exceptions(served: Served) -> None:
    ask: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    async with client(served) as api:
        with pytest.raises(anthropic.NotFoundError) as not_found:
            await api.messages.create(model="none", **ask)
        with pytest.raises(anthropic.BadRequestError):
            await api.messages.create(model=MODEL, **{**ask, "max_tokens": 9999})
    wrong_method = await served.get("/v1/messages")
    no_json = await served.request(
        "POST", "/v1/messages", data=b"{", headers={"Content-Type": "application/json"}
    )

    assert not_found.value.request_id
    assert wrong_method.status == 405
    assert error_in(wrong_method)["type"] == error_in(no_json)["type"] == "invalid_request_error"


async def test_error_inside_a_stream_raises_in_the_client(served: Served) -> None:
    served.runner.hold()
    async with client(served) as api:
        stream = await api.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=[{"role": "user", "content": "a"}],
            stream=True,
        )
        served.runner.fail_next = True
        served.runner.release()
        with pytest.raises(anthropic.APIStatusError, match="forward pass"):
            async for _ in stream:
                pass


async def test_silence_is_filled_with_ping_events() -> None:
    async with serving(sse_ping_interval=0.05) as served:
        served.runner.hold()
        asked = asyncio.create_task(send(served, stream=True))
        await asyncio.sleep(0.6)
        served.runner.release()
        raw = (await asked).raw

    assert raw.count(b'event: ping\ndata: {"type":"ping"}\n\n') >= 3
    assert events_in(raw)[-1] == {"type": "message_stop"}


async def test_key_is_taken_from_x_api_key_or_as_bearer_token() -> None:
    async with serving(api_key=("sk-1",)) as served:
        del served.session.headers["Authorization"]  # type: ignore[attr-defined]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
        path = "/v1/messages/count_tokens"
        answers = [
            await served.post(path, body, headers=headers)
            for headers in (
                {"x-api-key": "sk-1", "anthropic-version": "2023-06-01"},
                {"Authorization": "Bearer sk-1"},
                {"x-api-key": "sk-2"},
                {"x-api-key": ""},
                {},
            )
        ]

    assert [answer.status for answer in answers] == [200, 200, 401, 401, 401]
    assert error_in(answers[2])["type"] == "authentication_error"


async def test_fields_without_effect_are_listed_and_refused_when_strict(served: Served) -> None:
    fields: dict[str, Any] = {"metadata": {"user_id": "u"}, "surprise": 1, "seed": 1}
    listed = await send(served, **fields, temperature=1)
    async with serving(strict_params=True) as strict:
        refused = await send(strict, **fields, temperature=1)

    assert listed.headers["X-Ignored-Params"] == "metadata, surprise"
    assert refused.status == 400
    assert "metadata" in error_in(refused)["message"]
