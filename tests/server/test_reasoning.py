"""Reasoning in chat answers, written by a real model: split off, counted, limited, followed by
calls and JSON that a grammar holds to their form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmserve.config import ModelConfig
from llmserve.files.model import open_model
from llmserve.tokenizer import Tokenizer, load_tokenizer
from tests.scripted_checkpoint import ASSISTANT, Script, trigger, write_checkpoint
from tests.server.checkpoint_server import CheckpointServer, serving_checkpoint

CALL = '<tool_call>\n{"name": "lamp", "arguments": {"on": true}}\n</tool_call>'
SCRIPTS = {
    "think": "<think>Why 🙂 not?</think>Because.",
    "spelled": Script("<think>Why, spelled out?</think>Because it is.", is_spelled=True),
    "plain": "An answer without thoughts.",
    "unopened": "so it goes on</think>and ends.",
    "call": f"<think>I need the lamp.</think>I switch it. {CALL}",
    "call in thinking": f"<think>The lamp, at once {CALL}",
    "json": '<think>What JSON?</think>{"n": 5}',
    "call alone": f"\n\n{CALL}",
    "json alone": '{"n": 6}',
}
SPECIALS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% if opened %}<think>\n"
    "{% elif enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
LAMP = {
    "type": "function",
    "function": {
        "name": "lamp",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
NUMBER = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"n": {"enum": [5, 6]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("thinking") / "model", SCRIPTS, SPECIALS, template=TEMPLATE
    )


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[CheckpointServer]:
    async with serving_checkpoint(folder, reasoning_parser="qwen3") as running:
        yield running


async def ask(server: CheckpointServer, name: str, **fields: Any) -> dict[str, Any]:
    """The answer; what a stream of the same request makes is the same."""
    body = {"temperature": 0, "max_tokens": 120, **fields}
    answer = await server.chat(trigger(name), **body)
    streamed = await stream(server, trigger(name), **body)
    for usage in (answer["usage"], streamed["usage"]):
        del usage["prompt_tokens_details"]  # the second time the prompt is cached
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert streamed == {
        "reasoning": message.get("reasoning") or "",
        "content": message["content"] or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
        "usage": answer["usage"],
    }
    return answer


async def stream(server: CheckpointServer, text: str, **fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "usage": None}
    body = {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        raw = (await response.read()).decode()
    for line in raw.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        result["usage"] = event["usage"] or result["usage"]
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            assert choice["finish_reason"] or any(delta.values()), "an empty delta"
            result["reasoning"] += delta.get("reasoning") or ""
            result["content"] += delta.get("content") or ""
            result["finish_reason"] = choice["finish_reason"]
            for call in delta.get("tool_calls", []):
                if call["index"] == len(result["calls"]):
                    result["calls"].append({"name": call["function"]["name"], "arguments": ""})
                result["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return result


async def test_thoughts_are_split_off_under_both_names(server: CheckpointServer) -> None:
    message = (await ask(server, "think"))["choices"][0]["message"]

    assert message["reasoning"] == message["reasoning_content"] == "Why 🙂 not?"
    assert message["content"] == "Because."


@pytest.mark.parametrize("name", ["think", "spelled"])
async def test_reasoning_tokens_are_those_of_the_thoughts(
    server: CheckpointServer, folder: Path, name: str
) -> None:
    answer = await ask(server, name, return_token_ids=True)

    tokenizer = await asyncio.to_thread(_tokenizer, folder)
    pieces = [tokenizer.token_bytes(i) for i in answer["choices"][0]["token_ids"]]
    raw = b"".join(pieces)
    begin, end = raw.index(b"<think>") + len(b"<think>"), raw.index(b"</think>")
    at, expected = 0, 0
    for piece in pieces:
        expected += at < end and at + len(piece) > begin
        at += len(piece)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert expected > 3


async def test_answer_without_thoughts_is_content(server: CheckpointServer) -> None:
    answer = await ask(server, "plain")

    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "An answer without thoughts.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_template_that_opens_the_thinking_is_followed(server: CheckpointServer) -> None:
    fields = {"chat_template_kwargs": {"opened": True}}
    message = (await ask(server, "unopened", **fields))["choices"][0]["message"]

    assert (message["reasoning"], message["content"]) == ("so it goes on", "and ends.")


async def test_thinking_that_is_switched_off_leaves_content(server: CheckpointServer) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    message = (await ask(server, "plain", **fields))["choices"][0]["message"]

    assert (message["reasoning"], message["content"]) == (None, "An answer without thoughts.")


async def test_reasoning_can_be_left_out_and_still_counts(server: CheckpointServer) -> None:
    answer = await ask(server, "think", include_reasoning=False)

    message = answer["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == "Because."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("name", "reasoning", "content"),
    [
        ("call", "I need the lamp.", "I switch it. "),
        ("call in thinking", "The lamp, at once ", None),
    ],
)
async def test_calls_follow_thoughts_or_end_them(
    folder: Path, name: str, reasoning: str, content: str | None
) -> None:
    async with serving_checkpoint(
        folder, reasoning_parser="qwen3", tool_call_parser="hermes"
    ) as server:
        choice = (await ask(server, name, tools=[LAMP]))["choices"][0]

    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"on": True}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("budget", [0, 1, 2])
async def test_budget_ends_the_thinking(server: CheckpointServer, budget: int) -> None:
    unlimited = await ask(server, "think")
    limited = await ask(server, "think", thinking_token_budget=budget)

    message = limited["choices"][0]["message"]
    assert limited["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}
    assert unlimited["choices"][0]["message"]["reasoning"].startswith(message["reasoning"] or "")
    assert message["content"] == "Because."


async def test_budget_needs_a_reasoning_parser(folder: Path) -> None:
    async with serving_checkpoint(folder) as server, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": 5}
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            answer = await response.json()

    assert response.status == 400
    assert answer["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize("name", ["json", "think", "plain", "json alone"])
async def test_json_is_enforced_behind_the_thoughts(server: CheckpointServer, name: str) -> None:
    message = (await ask(server, name, response_format=NUMBER))["choices"][0]["message"]

    assert json.loads(message["content"])["n"] in (5, 6)
    # A model that is not let write what it would may as well think.
    assert (message["reasoning"] is None) == (name == "json alone")


def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(open_model(ModelConfig(model=str(folder)), print))


async def test_budget_goes_with_a_grammar(server: CheckpointServer) -> None:
    fields = {"response_format": NUMBER, "thinking_token_budget": 1}
    answer = await ask(server, "json", **fields)

    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (5, 6)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.parametrize("parser", ["hermes", "auto"])
@pytest.mark.parametrize("name", ["call", "think", "plain", "call alone"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lamp"}}])
async def test_call_is_enforced_behind_the_thoughts(
    folder: Path, parser: str, name: str, choice: Any
) -> None:
    async with serving_checkpoint(
        folder, reasoning_parser="qwen3", tool_call_parser=parser
    ) as server:
        answer = (await ask(server, name, tools=[LAMP], tool_choice=choice))["choices"][0]

    calls = answer["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"lamp"}
    assert all(json.loads(call["function"]["arguments"])["on"] in (True, False) for call in calls)
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert (answer["message"]["reasoning"] is None) == (name == "call alone")


async def test_strict_tool_constrains_a_call_that_begins(folder: Path) -> None:
    strict = {**LAMP, "function": {**LAMP["function"], "strict": True}}
    colour = {"properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
    strict["function"]["parameters"] = {"type": "object", **colour, "additionalProperties": False}
    async with serving_checkpoint(
        folder, reasoning_parser="qwen3", tool_call_parser="hermes"
    ) as server:
        choice = (await ask(server, "call", tools=[strict]))["choices"][0]
        plain = (await ask(server, "plain", tools=[strict]))["choices"][0]

    assert "tool_calls" in choice["message"], choice
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"colour": "red"}
    assert plain["message"]["content"] == "An answer without thoughts."
