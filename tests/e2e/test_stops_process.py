"""Where texts end, on a real server process with a real model whose texts are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server_process import running_server
from tests.scripted_checkpoint import OTHER_EOS, trigger, write_checkpoint

SCRIPTS = {
    "story": "Once upon a time there was a STOP sign, and it stopped.",
    "other end": f"An end of another kind.{OTHER_EOS}",
    "emoji": "a👩🏽‍💻b東京c🙂",
    "think": "<think>Let me think about it for long.</think>It is so.",
    "call": '<tool_call>\n{"name": "lamp", "arguments": {"on": true}}\n</tool_call>',
}
LAMP: Any = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("stops") / "model"
    write_checkpoint(folder, SCRIPTS, ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    flags = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--threads", "1")
    with (
        running_server("--model", str(folder), *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, name: str, **fields: Any) -> tuple[str, str, Any, int]:
    """Text, finish reason, stop reason and number of tokens; a stream must give the same."""
    extra = fields.pop("extra_body", {})
    body: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": trigger(name)}],
        "temperature": 0,
        "extra_body": extra,
        **fields,
    }
    whole = client.chat.completions.create(**body)
    choice = whole.choices[0]
    text, reason = "", ""
    usage = {"include_usage": True}
    for chunk in client.chat.completions.create(stream=True, stream_options=usage, **body):
        for part in chunk.choices:
            text += part.delta.content or ""
            assert "\ufffd" not in text
            reason = part.finish_reason or reason
    assert (text, reason) == (choice.message.content or "", choice.finish_reason)
    assert whole.usage is not None
    stop_reason = (choice.model_extra or {})["stop_reason"]
    return text, reason, stop_reason, whole.usage.completion_tokens


def test_text_ends_at_every_end_of_sequence_token(client: openai.OpenAI) -> None:
    assert ask(client, "story")[:3] == (SCRIPTS["story"], "stop", None)
    assert ask(client, "other end")[:3] == ("An end of another kind.", "stop", None)


@pytest.mark.parametrize("stop", ["STOP", "a STOP sign", ["zzz", "TOP", "STOP"], "e was a S"])
@pytest.mark.parametrize("is_included", [False, True])
def test_stop_string_over_token_borders_ends_the_text(
    client: openai.OpenAI, stop: str | list[str], is_included: bool
) -> None:
    extra = {"include_stop_str_in_output": is_included}
    text, reason, stop_reason, _ = ask(client, "story", stop=stop, extra_body=extra)

    stops = [stop] if isinstance(stop, str) else stop
    ends = [(SCRIPTS["story"].find(s) + len(s), s) for s in stops if s in SCRIPTS["story"]]
    end, matched = min(ends, key=lambda found: found[0])
    assert (reason, stop_reason) == ("stop", matched)
    assert text == SCRIPTS["story"][: end if is_included else end - len(matched)]


def test_min_tokens_puts_the_end_off(client: openai.OpenAI) -> None:
    natural = ask(client, "other end")
    more = ask(client, "other end", max_tokens=60, extra_body={"min_tokens": natural[3] + 5})

    assert more[0].startswith("An end of another kind.")
    assert more[3] >= natural[3] + 5


def test_characters_over_several_tokens_stay_whole(client: openai.OpenAI) -> None:
    assert ask(client, "emoji")[0] == SCRIPTS["emoji"]


def test_allowed_tokens_and_bad_words_leave_what_they_say(client: openai.OpenAI) -> None:
    allowed = {"allowed_token_ids": [ord("?"), ord("!")]}  # ids of bytes are the bytes
    only = ask(client, "story", max_tokens=3, extra_body=allowed)
    without = ask(client, "story", max_tokens=3, extra_body={**allowed, "bad_words": ["!"]})
    never_twice = ask(client, "story", max_tokens=3, extra_body={**allowed, "bad_words": ["!!"]})

    assert (only[0], without[0]) == ("!!!", "???")
    assert never_twice[0] == "!?!"


def test_budget_ends_thinking_and_call_is_parsed(client: openai.OpenAI) -> None:
    budget = ask(client, "think", extra_body={"thinking_token_budget": 2})
    call = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": trigger("call")}],
        tools=[LAMP],
        temperature=0,
    ).choices[0]

    assert budget[0] == "It is so."
    assert call.message.tool_calls is not None
    assert call.message.tool_calls[0].to_dict()["function"] == {
        "name": "lamp",
        "arguments": '{"on": true}',
    }
