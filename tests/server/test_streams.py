"""Streams on the wire: frames, equality with unstreamed answers, pings, errors, departures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.harness import MODEL, Answer, Served, serving, wait_for
from tests.server.scripted_runner import BOS_ID, END, LOGPROB

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def head(answer: Answer) -> str:
    """The fields that every chunk begins with, as they stand on the wire."""
    event = answer.events[0]
    fields = {key: event[key] for key in ("id", "object", "created", "model")}
    return json.dumps(fields, separators=(",", ":"))[:-1]


async def test_chat_stream_on_the_wire(served: Served) -> None:
    answer = await served.chat("hé", max_tokens=3, stream=True)

    start = head(answer)
    assert answer.raw.decode() == (
        f'data: {start},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},'
        '"logprobs":null,"finish_reason":null}]}\n\n'
        f'data: {start},"choices":[{{"index":0,"delta":{{"content":"h"}},'
        '"logprobs":null,"finish_reason":null}]}\n\n'
        f'data: {start},"choices":[{{"index":0,"delta":{{"content":"é"}},'
        '"logprobs":null,"finish_reason":null}]}\n\n'
        f'data: {start},"choices":[{{"index":0,"delta":{{}},'
        '"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )
    assert answer.events[0]["object"] == "chat.completion.chunk"


async def test_completion_stream_on_the_wire(served: Served) -> None:
    answer = await served.complete("ab", max_tokens=2, **USAGE)

    start = head(answer)
    assert answer.raw.decode() == (
        f'data: {start},"choices":[{{"index":0,"text":"a","logprobs":null,'
        '"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
        f'data: {start},"choices":[{{"index":0,"text":"b","logprobs":null,'
        '"finish_reason":"length","stop_reason":null}],"usage":null}\n\n'
        f'data: {start},"choices":[],"usage":{{"prompt_tokens":3,"completion_tokens":2,'
        '"total_tokens":5,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )
    assert answer.events[0]["object"] == "text_completion"


async def test_headers_suit_proxies_and_browsers(served: Served) -> None:
    answer = await served.chat(stream=True)

    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in answer.headers
    assert answer.headers["X-Request-Id"] in answer.events[0]["id"]


STREAMED = [
    {"max_tokens": 40},
    {"max_tokens": 40, "stop": ["lo w", "zzz"]},
    {"max_tokens": 40, "stop": "🙂 wor", "include_stop_str_in_output": True},
    {"max_tokens": 17, "n": 3, "temperature": 1, "seed": 1},
    {"max_tokens": 40, "stop_token_ids": [ord("w")]},
]


@pytest.mark.parametrize("fields", STREAMED)
@pytest.mark.parametrize("text", [f"héllo 🙂 world {END}", "👩🏽‍💻 終わり", "\ufffd\n\r\u2028"])
async def test_streamed_chat_equals_unstreamed(
    served: Served, text: str, fields: dict[str, Any]
) -> None:
    whole = await served.chatted(text, **fields)
    events = (await served.chat(text, **fields, **USAGE)).events

    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "end": None})
            assert choice["end"] is None, "a chunk after the last one"
            assert part["delta"].get("content") != "" or "role" in part["delta"]
            choice["text"] += part["delta"].get("content", "")
            if part["finish_reason"] is not None:
                choice["end"] = (part["finish_reason"], part["stop_reason"])
    assert choices == {
        choice["index"]: {
            "text": choice["message"]["content"],
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in whole["choices"]
    }
    usage = events[-1]["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == whole["usage"][key]


@pytest.mark.parametrize("fields", [*STREAMED, {"echo": True}, {"echo": True, "max_tokens": 0}])
async def test_streamed_completion_equals_unstreamed(
    served: Served, fields: dict[str, Any]
) -> None:
    prompts = [f"héllo 🙂 world {END}", "ab"]
    whole = await served.completed(prompts, **fields)
    events = (await served.complete(prompts, **fields, **USAGE)).events

    texts = {choice["index"]: "" for choice in whole["choices"]}
    ends = {}
    for event in events:
        for part in event["choices"]:
            texts[part["index"]] += part["text"]
            if part["finish_reason"] is not None:
                ends[part["index"]] = (part["finish_reason"], part["stop_reason"])
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert ends == {
        choice["index"]: (choice["finish_reason"], choice["stop_reason"])
        for choice in whole["choices"]
    }
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_streamed_chat_logprobs_equal_unstreamed(served: Served) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12, "stop": "zz"}
    text = f"hé🙂!{END}"

    whole = (await served.chatted(text, **fields))["choices"][0]
    answer = await served.chat(text, stream=True, **fields)

    rows = [
        row
        for event in answer.events
        for choice in event["choices"]
        if choice["logprobs"]
        for row in choice["logprobs"]["content"]
    ]
    assert rows == whole["logprobs"]["content"]
    joined = b"".join(bytes(row["bytes"]) for row in rows)
    assert joined.decode() == whole["message"]["content"] == "hé🙂!"


async def test_streamed_echo_with_logprobs_equals_unstreamed(served: Served) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 4}

    whole = (await served.completed("héllo", **fields))["choices"][0]
    answer = await served.complete("héllo", stream=True, **fields)

    joined: dict[str, list[Any]] = {key: [] for key in whole["logprobs"]}
    for event in answer.events:
        for key, values in event["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == whole["logprobs"]
    assert "".join(event["choices"][0]["text"] for event in answer.events) == whole["text"]


async def test_usage_is_null_until_the_last_chunk(served: Served) -> None:
    events = (await served.chat(**USAGE)).events

    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8


async def test_usage_is_absent_unless_asked_for(served: Served) -> None:
    events = (await served.chat(stream=True)).events

    assert not any("usage" in event for event in events)


async def test_continuous_usage_grows_to_the_total(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    events = (await served.complete("abc", stream=True, stream_options=options)).events

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert {event["usage"]["prompt_tokens"] for event in events} == {4}


async def test_prompt_token_ids_come_with_the_first_chunk_only(served: Served) -> None:
    chat = (await served.chat("ab", stream=True, return_token_ids=True, max_tokens=2)).events
    completion = (await served.complete("ab", stream=True, return_token_ids=True)).events

    assert chat[0]["prompt_token_ids"] == [BOS_ID, 97, 98]
    assert not any("prompt_token_ids" in event for event in chat[1:])
    assert [choice.get("token_ids") for e in chat for choice in e["choices"]][1:3] == [[97], [98]]
    assert completion[0]["choices"][0]["prompt_token_ids"] == [BOS_ID, 97, 98]
    assert "prompt_token_ids" not in completion[1]["choices"][0]


async def test_stop_string_never_leaks_into_a_delta(served: Served) -> None:
    answer = await served.chat("abcSTOPdef", stop="STOP", max_tokens=20, stream=True)

    contents = [choice["delta"].get("content") for e in answer.events for choice in e["choices"]]
    assert "".join(filter(None, contents)) == "abc"


async def test_headers_and_role_arrive_before_the_first_token(served: Served) -> None:
    served.runner.hold()

    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with served.session.post(served.url + CHAT, json={**body, "max_tokens": 1}) as response:
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 30)
        served.runner.release()
        rest = await response.read()

    assert b'"role":"assistant"' in first
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_silent_stream_gets_pings_between_whole_frames() -> None:
    async with serving(sse_ping_interval=0.05) as served:
        served.runner.delay_s = 0.2

        answer = await served.complete("ab", max_tokens=3, stream=True)

        assert answer.raw.startswith(b": ping\n\n")
        assert answer.raw.count(b": ping\n\n") >= 4
        assert "".join(event["choices"][0]["text"] for event in answer.events) == "aba"


async def test_pings_can_be_switched_off() -> None:
    async with serving(sse_ping_interval=0) as served:
        served.runner.delay_s = 0.1

        answer = await served.complete("ab", max_tokens=2, stream=True)

        assert b"ping" not in answer.raw


async def test_error_after_the_headers_is_an_event_and_done_follows(served: Served) -> None:
    served.runner.fail_next = True

    answer = await served.complete("ab", stream=True)

    frames = answer.frames
    assert answer.status == 200
    assert len(frames) == 2
    assert json.loads(frames[0])["error"]["type"] == "internal_server_error"
    assert frames[1] == "[DONE]"


async def test_error_before_the_headers_has_its_status(served: Served) -> None:
    answer = await served.chat(stream=True, temperature=9)

    assert (answer.status, answer.error["param"]) == (400, "temperature")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_client_that_leaves_frees_its_request(
    served: Served, path: str, is_streamed: bool
) -> None:
    served.runner.delay_s = 0.01
    body = {
        "model": MODEL,
        "max_tokens": 400,
        "stream": is_streamed,
        **(
            {"prompt": ["ab", "cd"]}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": "ab"}]}
        ),
    }
    task = asyncio.create_task(served.post(path, body))
    await wait_for(lambda: served.scheduler.num_running > 0)

    task.cancel()

    await asyncio.gather(task, return_exceptions=True)
    await served.wait_idle()
    aborted = served.engine.stats.registry.get_sample_value(
        "llmserve:request_success_total", {"model_name": MODEL, "finished_reason": "abort"}
    )
    assert aborted == (2 if path == COMPLETIONS else 1)


async def test_client_that_leaves_while_queued_frees_its_request(served: Served) -> None:
    served.runner.hold()
    tasks = [asyncio.create_task(served.complete("ab", max_tokens=400)) for _ in range(80)]
    await wait_for(lambda: served.engine.num_unfinished == 80)

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    served.runner.release()

    await served.wait_idle()


async def test_slow_reader_slows_nobody_else(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.host_port, limit=1024)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": "ab",
            "max_tokens": 400,
            "stream": True,
            "n": 20,
            "logprobs": 20,
            "temperature": 1,
        }
    ).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await writer.drain()
    await reader.readuntil(b"data:")

    others = await asyncio.wait_for(
        asyncio.gather(*(served.completed("xyz", max_tokens=50) for _ in range(5))), 20
    )

    assert all(other["usage"]["completion_tokens"] == 50 for other in others)
    assert {other["choices"][0]["text"] for other in others} == {("xyz" * 20)[:50]}
    writer.close()


async def test_streams_of_many_clients_do_not_mix(served: Served) -> None:
    async def one(i: int) -> bool:
        text = f"item-{i}-é{i * i}|"
        if i % 2:
            answer = await served.chat(text, max_tokens=60, stream=True)
            deltas = [c["delta"] for event in answer.events for c in event["choices"]]
            content = "".join(delta.get("content", "") for delta in deltas)
        else:
            content = (await served.chatted(text, max_tokens=60))["choices"][0]["message"][
                "content"
            ]
        return (text * 60).startswith(content) and len(content) > 20

    assert all(await asyncio.gather(*(one(i) for i in range(24))))


async def test_logprob_values_in_a_chat_stream_are_finite(served: Served) -> None:
    answer = await served.chat("a", logprobs=True, top_logprobs=5, max_tokens=1, stream=True)

    row = answer.events[1]["choices"][0]["logprobs"]["content"][0]
    assert row["logprob"] == LOGPROB
    assert row["top_logprobs"][-1]["logprob"] == -9999.0


async def test_failed_step_fails_a_batch_of_prompts_as_a_whole(served: Served) -> None:
    served.runner.fail_next = True
    whole = await served.complete(["ab", "cd", "ef"])
    served.runner.fail_next = True
    streamed = await served.complete(["ab", "cd", "ef"], stream=True)

    assert (whole.status, whole.error["type"]) == (500, "internal_server_error")
    assert "error" in json.loads(streamed.frames[-2])
    assert streamed.frames[-1] == "[DONE]"
