"""Tool calls of every format, written by a real model: the same streamed and unstreamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from llmserve.tool_parsers import PARSERS
from tests.scripted_checkpoint import Script, trigger, write_checkpoint
from tests.server.checkpoint_server import CheckpointServer, serving_checkpoint
from tests.tool_parser_texts import CALLS, FORMATS, TOOLS, parser_name

TOOL_FIELDS = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    for tool in TOOLS
]
KINDS = ("one", "unicode", "escapes", "types", "no arguments", "parallel")


def scripts_of(name: str) -> dict[str, Script]:
    """Texts of a format by kind, spelled out, and one call with special tokens."""
    form = FORMATS[name]
    before = "" if form.bare else "I look. "
    texts = {kind: before + form.write(CALLS[kind]) for kind in KINDS}
    scripts = {kind: Script(text, is_spelled=True) for kind, text in texts.items()}
    return scripts | {"tokens": Script(before + form.write(CALLS["no arguments"]))}


async def read_stream(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """The message that a stream makes, by the client's own types."""
    content, calls, reason = "", [], None
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or []:
            assert delta.function is not None
            if delta.function.name:
                assert delta.id
                assert delta.index == len(calls)
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments or ""
    return {"content": content or None, "calls": calls, "reason": reason}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint for each format."""
    root = tmp_path_factory.mktemp("formats")
    return {
        name: write_checkpoint(root / str(number), scripts_of(name), FORMATS[name].tokens)
        for number, name in enumerate(FORMATS)
    }


def test_every_parser_has_a_format() -> None:
    classes = {PARSERS[parser_name(name)] for name in FORMATS}

    assert classes == set(PARSERS.values())


@pytest.fixture
async def server(
    folders: dict[str, Path], request: pytest.FixtureRequest
) -> AsyncIterator[tuple[str, CheckpointServer]]:
    name: str = request.param
    async with serving_checkpoint(folders[name], tool_call_parser=parser_name(name)) as server:
        yield name, server


@pytest.mark.parametrize("server", FORMATS, indirect=True)
async def test_calls_come_out_streamed_and_not(server: tuple[str, CheckpointServer]) -> None:
    name, running = server
    client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    async with client:
        for kind in (*KINDS, "tokens"):
            messages = [{"role": "user", "content": trigger(kind)}]
            fields = {"model": "scripted", "messages": messages, "tools": TOOL_FIELDS}
            streamed = await read_stream(client, temperature=0, **fields)
            whole = await client.chat.completions.create(temperature=0, **fields)

            choice = whole.choices[0]
            calls = choice.message.tool_calls or []
            expected = CALLS["no arguments" if kind == "tokens" else kind]
            assert [call.function.name for call in calls] == [called for called, _ in expected]
            for call, (_, arguments) in zip(calls, expected, strict=True):
                assert json.loads(call.function.arguments) == arguments, (name, kind)
            assert len({call.id for call in calls}) == len(calls)
            assert choice.finish_reason == "tool_calls"
            assert (choice.message.content or "") == ("" if FORMATS[name].bare else "I look. ")
            assert streamed == {
                "content": choice.message.content,
                "calls": [[call.function.name, call.function.arguments] for call in calls],
                "reason": "tool_calls",
            }
