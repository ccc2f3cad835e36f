"""Calls that end early or may not be made: what comes back, and how it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Answer, Served, serving
from tests.server.scripted_runner import END


def tool(name: str, **function: Any) -> dict[str, Any]:
    parameters = {"type": "object"}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"on": true}}}}</tool_call>'


TOOLS = [tool("lamp"), tool("door")]
CALL = call("lamp")
NAMED = {"type": "function", "function": {"name": "lamp"}}
PARSING: dict[str, Any] = {"tool_call_parser": "hermes"}


async def ask(served: Served, text: str, **fields: Any) -> Answer:
    return await served.chat(f"{text}{END}", **{"tools": TOOLS, "max_tokens": 200, **fields})


async def ask_both(served: Served, text: str, **fields: Any) -> tuple[str, str, str]:
    """Content, arguments of the first call and finish_reason, the same streamed and not."""
    choice = (await ask(served, text, **fields)).json["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    arguments = "".join(made["function"]["arguments"] for made in calls[:1])
    whole = (message["content"] or "", arguments, choice["finish_reason"])

    content = arguments = ""
    for event in (await ask(served, text, stream=True, **fields)).events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for made in delta.get("tool_calls", []):
            arguments += made["function"]["arguments"]
    assert (content, arguments, event["choices"][0]["finish_reason"]) == whole
    return whole


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_stops_do_not_cut_a_forced_call(choice: Any) -> None:
    fields = {"tool_choice": choice, "stop": ['"', "on"], "stop_token_ids": [ord("n")]}
    async with serving(**PARSING) as served:
        _, arguments, _ = await ask_both(served, CALL, **fields)
        answer = await ask(served, CALL, **fields)

    assert arguments == '{"on": true}'
    assert answer.headers["X-Ignored-Params"] == "stop, stop_token_ids"


async def test_stops_hold_where_no_call_is_forced() -> None:
    async with serving(**PARSING) as served:
        answer = await ask(served, "One. Two.", stop=" T")

    assert answer.json["choices"][0]["message"]["content"] == "One."
    assert "X-Ignored-Params" not in answer.headers


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("size", [1, 5, 11, 15, 25])
async def test_forced_call_cut_before_its_name_is_known_is_content(choice: Any, size: int) -> None:
    async with serving(**PARSING) as served:
        cut = await ask_both(served, CALL, tool_choice=choice, max_tokens=size)

    assert cut == (CALL[:size], "", "length")


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_call_cut_later_is_given_out_in_part(choice: Any) -> None:
    size = CALL.index("true") + 2
    async with serving(**PARSING) as served:
        cut = await ask_both(served, CALL, tool_choice=choice, max_tokens=size)

    assert cut == ("", '{"on": tr', "length")


async def test_second_forced_call_without_its_name_is_left_out() -> None:
    text = CALL + call("door")
    async with serving(**PARSING) as served:
        cut = await ask_both(served, text, tool_choice="required", max_tokens=len(CALL) + 20)

    assert cut == ("", '{"on": true}', "length")


async def test_call_that_a_stop_string_cuts_is_no_reason_to_end() -> None:
    strict = [tool("lamp", strict=True)]
    async with serving(**PARSING) as served:
        cut = await ask_both(served, CALL, tools=strict, stop="ue")

    assert cut == ("", '{"on": tr', "stop")


async def test_malformed_call_behind_another_leaves_the_reason() -> None:
    malformed = CALL.replace("true", "maybe")
    async with serving(**PARSING) as served:
        read = await ask_both(served, CALL + malformed)

    assert read == (malformed, '{"on": true}', "tool_calls")


@pytest.mark.parametrize("names", [("door",), ("lamp", "door")])
async def test_call_of_a_tool_that_is_not_allowed_is_content(names: tuple[str, ...]) -> None:
    allowed = {"mode": "auto", "tools": [tool(name) for name in names]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with serving(**PARSING) as served:
        read = await ask_both(served, CALL, tool_choice=choice)

    expected = ("", '{"on": true}', "tool_calls") if "lamp" in names else (CALL, "", "stop")
    assert read == expected


@pytest.mark.parametrize(
    ("text", "fields", "mode", "outcome"),
    [
        (CALL, {}, "auto", "success"),
        ("Words.", {}, "auto", "none"),
        (CALL.replace("true", "maybe"), {}, "auto", "error"),
        (CALL, {"max_tokens": 50}, "auto", "error"),
        (CALL + CALL.replace("true", "maybe"), {}, "auto", "success"),
        (CALL, {"tool_choice": "required"}, "required", "success"),
        (CALL, {"tool_choice": "required", "max_tokens": 50}, "required", "error"),
        (CALL, {"tool_choice": NAMED}, "named", "success"),
        (CALL, {"tool_choice": NAMED, "max_tokens": 5}, "named", "error"),
    ],
)
async def test_searches_for_calls_are_counted(
    text: str, fields: dict[str, Any], mode: str, outcome: str
) -> None:
    name = "llmserve:tool_call_parser_invocations_total"
    async with serving(**PARSING) as served:
        await ask(served, text, **fields)
        await ask(served, text, tool_choice="none")
        lines = (await served.get("/metrics")).raw.decode().split("\n")

    counted = [line for line in lines if line.startswith(name) and not line.endswith(" 0.0")]
    (line,) = counted
    assert f'mode="{mode}"' in line
    assert f'outcome="{outcome}"' in line
    assert line.endswith(" 1.0")
