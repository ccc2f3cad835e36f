"""Anthropic's Python client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.e2e.server_process import ServerProcess

MESSAGES: Any = [{"role": "user", "content": "Name a river."}]
TOOL: Any = {
    "name": "set_lamp",
    "description": "Sets the lamp.",
    "input_schema": {
        "type": "object",
        "properties": {"level": {"type": "integer", "enum": [0, 50, 100]}},
        "required": ["level"],
        "additionalProperties": False,
    },
}


class Fruit(BaseModel):
    name: Literal["apple", "plum"]
    is_ripe: bool


@pytest.fixture(scope="module")
def model(demo_server: ServerProcess) -> str:
    return str(httpx.get(f"{demo_server.url}/v1/models").json()["data"][0]["id"])


@pytest.fixture(scope="module")
def api(demo_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=demo_server.url, api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


def test_messages_say_what_chat_says(
    api: anthropic.Anthropic, model: str, demo_server: ServerProcess
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    chat = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=120).json()
    ask: Any = {"model": model, "messages": MESSAGES, "max_tokens": 12}
    whole = api.messages.create(**ask, extra_body={"temperature": 0})
    with api.messages.stream(**ask, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)

    (block,) = whole.content
    assert block.type == "text"
    assert block.text == text == chat["choices"][0]["message"]["content"]
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12
    count = api.messages.count_tokens(model=model, messages=MESSAGES)
    assert count.input_tokens == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "set_lamp"}], ids=["any", "tool"]
)
def test_forced_tool_use_is_the_same_streamed_and_not(
    api: anthropic.Anthropic, model: str, choice: Any
) -> None:
    ask: Any = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 200,
        "tools": [TOOL],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    whole = api.messages.create(**ask)
    with api.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    (use,) = whole.content
    assert use.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
    after = api.messages.create(
        model=model,
        max_tokens=3,
        tools=[TOOL],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ],
    )

    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert use.name == "set_lamp"
    assert use.input["level"] in (0, 50, 100)
    assert streamed.content[0].input == use.input  # type: ignore[union-attr]
    assert after.usage.output_tokens >= 1


def test_parse_gives_an_object_of_the_pydantic_model(api: anthropic.Anthropic, model: str) -> None:
    parsed = api.messages.parse(model=model, messages=MESSAGES, max_tokens=100, output_format=Fruit)

    assert isinstance(parsed.parsed_output, Fruit)


async def test_asynchronous_client_streams(demo_server: ServerProcess, model: str) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=demo_server.url, api_key="none") as api,
        api.messages.stream(model=model, messages=MESSAGES, max_tokens=8) as stream,
    ):
        final = await stream.get_final_message()

    assert final.usage.output_tokens <= 8
