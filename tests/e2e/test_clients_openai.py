"""OpenAI's Python client against a real server: chat, structured outputs, tools, responses.

The model is too small to follow instructions, so outputs are forced by schemas, or two ways of
asking are compared.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from tests.e2e.server_process import ServerProcess

MESSAGES: Any = [{"role": "user", "content": "Name a river."}]
PARAMETERS = {
    "type": "object",
    "properties": {"level": {"type": "integer", "enum": [0, 50, 100]}},
    "required": ["level"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "set_lamp", "parameters": PARAMETERS, "strict": True},
}


class Fruit(BaseModel):
    name: Literal["apple", "plum"]
    is_ripe: bool


@pytest.fixture(scope="module")
def model(demo_server: ServerProcess) -> str:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none") as api:
        return next(iter(api.models.list())).id


@pytest.fixture(scope="module")
def api(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{demo_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chat_is_the_same_streamed_and_not(api: openai.OpenAI, model: str) -> None:
    ask: Any = {"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = api.chat.completions.create(**ask)
    stream = api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 12  # type: ignore[union-attr]


def test_parse_gives_an_object_of_the_pydantic_model(api: openai.OpenAI, model: str) -> None:
    parsed = api.chat.completions.parse(
        model=model, messages=MESSAGES, max_tokens=100, temperature=0, response_format=Fruit
    )

    assert isinstance(parsed.choices[0].message.parsed, Fruit)


def test_stream_helper_parses_text_and_calls(api: openai.OpenAI, model: str) -> None:
    with api.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=100, temperature=0, response_format=Fruit
    ) as stream:
        text = stream.get_final_completion().choices[0].message
    with api.chat.completions.stream(
        model=model,
        messages=MESSAGES,
        max_tokens=200,
        temperature=0,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]

    assert isinstance(text.parsed, Fruit)
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.parsed_arguments["level"] in (0, 50, 100)  # type: ignore[index]


def test_named_call_and_its_result_make_the_round_trip(api: openai.OpenAI, model: str) -> None:
    named: Any = {"type": "function", "function": {"name": "set_lamp"}}
    first = api.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=100,
        temperature=0,
        tools=[TOOL],
        tool_choice=named,
    )
    (call,) = first.choices[0].message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    second = api.chat.completions.create(
        model=model,
        messages=[*MESSAGES, first.choices[0].message, result],
        max_tokens=5,
        tools=[TOOL],
        extra_body={"ignore_eos": True},
    )

    assert json.loads(call.function.arguments)["level"] in (0, 50, 100)  # type: ignore[union-attr]
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_responses_say_what_chat_says(api: openai.OpenAI, model: str) -> None:
    chat = api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    ask: Any = {"model": model, "input": "Name a river.", "max_output_tokens": 12}
    whole = api.responses.create(**ask, temperature=0)
    with api.responses.stream(**ask, temperature=0) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")

    assert whole.output_text == text == chat.choices[0].message.content
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12


def test_responses_parse_and_stream_into_a_pydantic_model(api: openai.OpenAI, model: str) -> None:
    ask: Any = {"model": model, "input": "A fruit?", "max_output_tokens": 100, "temperature": 0}
    whole = api.responses.parse(**ask, text_format=Fruit)
    with api.responses.stream(**ask, text_format=Fruit) as stream:
        streamed = stream.get_final_response()

    assert isinstance(whole.output_parsed, Fruit)
    assert streamed.output_parsed == whole.output_parsed


def test_responses_call_a_tool_and_go_on(api: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "set_lamp", "parameters": PARAMETERS, "strict": True}
    ask: Any = {"model": model, "tools": [tool], "temperature": 0, "max_output_tokens": 200}
    first = api.responses.create(
        input="Light!", tool_choice="required", parallel_tool_calls=False, **ask
    )
    call = first.output[0]
    assert isinstance(call, ResponseFunctionToolCall)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = api.responses.create(
        input=[result],
        previous_response_id=first.id,
        **{**ask, "max_output_tokens": 5},
    )
    whole = api.responses.create(
        input=[{"role": "user", "content": "Light!"}, *first.output, result],  # type: ignore[list-item]
        **{**ask, "max_output_tokens": 5},
    )

    assert json.loads(call.arguments)["level"] in (0, 50, 100)
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text


async def test_asynchronous_client_runs_many_at_once(
    demo_server: ServerProcess, model: str
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none") as api:
        parsed = await asyncio.gather(
            *(
                api.chat.completions.parse(
                    model=model, messages=MESSAGES, max_tokens=100, response_format=Fruit
                )
                for _ in range(4)
            )
        )
        stream = await api.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=5, stream=True
        )
        chunks = [chunk async for chunk in stream]

    assert all(isinstance(p.choices[0].message.parsed, Fruit) for p in parsed)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
