"""Tool calls over HTTP: the model's text is searched only where the server was told to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.errors import StartupError
from tests.server.harness import Served, serving
from tests.server.scripted_runner import END

TOOL = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "lamp", "arguments": {"on": true}}</tool_call>'
PARSING: dict[str, Any] = {"tool_call_parser": "hermes"}


async def ask(served: Served, text: str, **fields: Any) -> Any:
    return await served.chat(f"{text}{END}", **{"tools": [TOOL], "max_tokens": 200, **fields})


async def test_call_becomes_a_tool_call_and_the_text_before_it_stays() -> None:
    async with serving(**PARSING) as served:
        choice = (await ask(served, f"I look. {CALL}")).json["choices"][0]

    message = choice["message"]
    call = message["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I look. "
    assert (call["type"], call["function"]["name"]) == ("function", "lamp")
    assert json.loads(call["function"]["arguments"]) == {"on": True}
    assert call["id"].startswith("call_")


async def test_streamed_calls_equal_unstreamed_calls() -> None:
    async with serving(**PARSING) as served:
        whole = (await ask(served, f"a{CALL}{CALL}")).json["choices"][0]["message"]
        events = (await ask(served, f"a{CALL}{CALL}", stream=True)).events

    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "a"
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [c["function"] for c in whole["tool_calls"]]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_message_of_calls_alone_has_no_content() -> None:
    async with serving(**PARSING) as served:
        message = (await ask(served, CALL)).json["choices"][0]["message"]

    assert message["content"] is None


async def test_text_is_left_alone_without_the_flag_without_tools_and_with_choice_none() -> None:
    async with serving() as served:
        plain = (await ask(served, CALL)).json["choices"][0]
    async with serving(**PARSING) as served:
        without_tools = (await ask(served, CALL, tools=None)).json["choices"][0]
        forbidden = (await ask(served, CALL, tool_choice="none")).json["choices"][0]

    for choice in (plain, without_tools, forbidden):
        assert "lamp" in choice["message"]["content"]
        assert "tool_calls" not in choice["message"]


async def test_no_more_than_one_call_without_parallel_calls() -> None:
    async with serving(**PARSING) as served:
        whole = (await ask(served, f"{CALL}{CALL}", parallel_tool_calls=False)).json["choices"][0]
        events = (await ask(served, f"{CALL}{CALL}", parallel_tool_calls=False, stream=True)).events

    assert len(whole["message"]["tool_calls"]) == 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert {call["index"] for delta in deltas for call in delta.get("tool_calls", [])} == {0}


async def test_automatic_calls_can_be_switched_off() -> None:
    async with serving(**PARSING, enable_auto_tool_choice=False) as served:
        message = (await ask(served, CALL)).json["choices"][0]["message"]

    assert message["content"].startswith("<tool_call>")
    assert "tool_calls" not in message


async def test_fields_that_nothing_gives_an_effect_are_named(served: Served) -> None:
    answer = await served.chat(
        parallel_tool_calls=True, include_reasoning=True, reasoning_effort="low"
    )

    assert answer.headers["X-Ignored-Params"] == (
        "include_reasoning, parallel_tool_calls, reasoning_effort"
    )


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def test_tools_and_documents_that_no_template_reads_are_named() -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "documents": [{"text": "x"}]}
    async with serving(template=PLAIN) as served:
        ignored = await served.chat(**fields)
        forced = await served.chat(**fields, tool_choice="required")
        empty = await served.chat(tools=[], documents=[])
    async with serving(template=PLAIN, **PARSING) as served:
        searched = await served.chat(**fields)
    async with serving(template=PLAIN + "{{ tools }}{{ documents }}") as served:
        read = await served.chat(**fields)
    async with serving(template=PLAIN, strict_params=True) as served:
        refused = await served.chat(tools=[TOOL])

    assert ignored.headers["X-Ignored-Params"] == "documents, tools"
    assert forced.headers["X-Ignored-Params"] == "documents"
    assert searched.headers["X-Ignored-Params"] == "documents"
    assert "X-Ignored-Params" not in empty.headers
    assert "X-Ignored-Params" not in read.headers
    assert refused.error["param"] == "tools"


async def test_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError, match=r"--tool-call-parser is 'nope'.*hermes"):
        async with serving(tool_call_parser="nope"):
            pass


async def test_required_tool_whose_schema_cannot_be_held_to_is_refused() -> None:
    parameters = {"type": "object", "properties": {"n": {"exclusiveMinimum": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    async with serving() as served:
        response = await served.chat(tools=[tool], tool_choice="required")

        assert response.status == 400
        error = response.json["error"]
        assert error["param"] == "tools[0].function.parameters"
        assert "exclusiveMinimum" in error["message"]
