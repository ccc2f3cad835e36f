"""Each field is honoured or refused by name; malformed and hostile bodies get a clean 4xx."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from tests.pauses import Heartbeat, scaled
from tests.server.harness import MODEL, Answer, Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}

OUT_OF_RANGE: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-1, 2.1, "1", True, [1])),
    *(("top_p", value) for value in (0, -0.1, 1.5, "x")),
    *(("top_k", value) for value in (-5, 1.5, "9")),
    *(("min_p", value) for value in (-0.1, 1.5)),
    *(("presence_penalty", value) for value in (-2.1, 9)),
    *(("frequency_penalty", value) for value in (-2.1, 9)),
    *(("repetition_penalty", value) for value in (0, -1)),
    *(("n", value) for value in (0, -1, 129, "two", 1.5)),
    *(("max_tokens", value) for value in (-1, "9", 1.5, 10**30)),
    *(("min_tokens", value) for value in (-1, 100)),
    *(("seed", value) for value in (1 << 64, "x", 1.5)),
    *(("stop", value) for value in (5, "", [""], ["a", 5], ["x"] * 17)),
    *(("stop_token_ids", value) for value in (5, [258], [-5], ["a"], [True])),
    *(("logit_bias", value) for value in ([], {"AI": 1}, {"999999": 1}, {"5": 101}, {"5": "x"})),
    *(("logit_bias", value) for value in ({"-1": 1}, {"٣": 1}, {"9" * 30: 1})),
    *(("allowed_token_ids", value) for value in ([], [258], [-1], "x", [1.5])),
    *(("bad_words", value) for value in ("x", [""], [5])),
    *(("stream", value) for value in ("maybe", 1, "true")),
    *(("stream_options", value) for value in (5, {"include_usage": True}, {"include_usage": "x"})),
    *(("prompt_logprobs", value) for value in (-1, 21, "x")),
    *(("truncate_prompt_tokens", value) for value in (0, -2, 513, "x")),
    ("truncation_side", "middle"),
    *(("priority", value) for value in (1, -1, "x")),
    *(("cache_salt", value) for value in ("", "x" * 129, 5)),
    *(("request_id", value) for value in ("", "a b", "x" * 129, "ü", 5)),
    *(("ignore_eos", value) for value in (1, "yes")),
    *(("skip_special_tokens", value) for value in (1, "yes")),
    ("model", 5),
]

NOT_SERVED: list[tuple[str, Any]] = [
    ("response_format", {"type": "structural_tag"}),
    ("structured_outputs", {"choice": ["a"], "regex": "a"}),
    ("structured_outputs", {"lark": "a"}),
    *(("thinking_token_budget", value) for value in (5, [], "", {})),
]

MALFORMED_FORMAT: list[Any] = [
    *("json", 5, [], {}, {"type": "yaml"}, {"type": 5}, {"type": "json_schema"}),
    *({"type": "json_schema", "schema": {}}, {"type": "json_schema", "json_schema": {"name": "x"}}),
]


def assert_refused(answer: Answer, field: str) -> None:
    assert answer.status == 400, answer.raw
    error = answer.error
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert field in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
async def test_value_out_of_range_is_refused_by_name(
    shared: Served, field: str, value: Any
) -> None:
    assert_refused(await shared.chat(**{"temperature": 1, field: value}), field)
    assert_refused(await shared.complete(**{"temperature": 1, field: value}), field)


@pytest.mark.parametrize(("field", "value"), NOT_SERVED)
async def test_what_is_not_served_is_refused_by_name(
    shared: Served, field: str, value: Any
) -> None:
    assert_refused(await shared.chat(**{field: value}), field)
    assert_refused(await shared.complete(**{field: value}), field)


@pytest.mark.parametrize("value", MALFORMED_FORMAT)
async def test_malformed_response_format_is_refused(shared: Served, value: Any) -> None:
    assert_refused(await shared.chat(response_format=value), "response_format")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("logprobs", value) for value in (-1, 21, "x", True)),
        *(("best_of", value) for value in (0, 5, "x")),
        ("suffix", "after"),
        *(("echo", value) for value in ("x", 1)),
        ("prompt_embeds", "AAAA"),
    ],
)
async def test_completions_field_is_refused_by_name(shared: Served, field: str, value: Any) -> None:
    assert_refused(await shared.complete(**{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("messages", value) for value in (5, "hello", [], {}, ["x"], [{"content": "x"}])),
        *(("messages", [{"role": role, "content": "x"}]) for role in (None, 5, "")),
        *(("messages", [{"role": "user", "content": value}]) for value in (None, 7, [5], {})),
        *(("messages", [{"role": "user", "content": [{"type": "x"}]}]),),
        *(("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),),
        *(("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),),
        *(("messages", [{"role": "assistant", "tool_calls": value}]) for value in (5, [5], [{}])),
        ("messages", [{"role": "user", "content": "x", "name": 5}]),
        *(("tools", value) for value in (5, {}, ["x"], [{"type": "x"}], [{"type": "function"}])),
        *(("tool_choice", value) for value in ("auto", "required", "maybe", 5)),
        *(("top_logprobs", value) for value in (21, -2, 10**9, "x", 2)),
        *(("max_completion_tokens", value) for value in (0, -1, "x")),
        *(("chat_template_kwargs", value) for value in (5, [])),
        *(("documents", value) for value in (5, ["x"])),
        ("chat_template", "x"),
        ("logprobs", 5),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("continue_final_message", "x"),
        ("add_generation_prompt", "x"),
        ("parallel_tool_calls", "x"),
    ],
)
async def test_chat_field_is_refused_by_name(shared: Served, field: str, value: Any) -> None:
    logprobs = {"logprobs": True} if field == "top_logprobs" and value != 2 else {}

    assert_refused(await shared.chat(**{**logprobs, field: value}), field)


@pytest.mark.parametrize(
    "choice",
    [
        "always",
        {"type": "function"},
        {"type": "function", "function": {"name": "g"}},
        {"type": "allowed_tools", "tools": []},
    ],
)
async def test_malformed_tool_choice_is_refused(shared: Served, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}

    assert_refused(await shared.chat(tools=[tool], tool_choice=choice), "tool_choice")


async def test_message_names_value_and_range(shared: Served) -> None:
    error = (await shared.chat(temperature=9)).error

    assert error["message"] == "temperature is 9; it must be a number from 0 to 2"
    assert error["param"] == "temperature"


async def test_offending_value_is_shown_shortened(shared: Served) -> None:
    error = (await shared.chat(truncation_side="x" * 10_000)).error

    assert "xxx" in error["message"]
    assert len(error["message"]) < 200


async def test_wrong_message_is_named_by_its_place(shared: Served) -> None:
    answer = await shared.post(
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}, {"role": "user"}]},
    )

    assert answer.error["param"] == "messages[1].content"


@pytest.mark.parametrize("fields", [{"messages": None}, {"messages": None, "prompt": "x"}])
async def test_missing_messages_are_named(shared: Served, fields: dict[str, Any]) -> None:
    answer = await shared.chat(**fields)

    assert answer.error["message"] == "messages is required"


async def test_n_with_temperature_0_is_refused(shared: Served) -> None:
    assert_refused(await shared.chat(n=2, temperature=0), "n")


async def test_prompt_logprobs_do_not_go_with_stream(shared: Served) -> None:
    assert_refused(await shared.complete(stream=True, prompt_logprobs=1), "prompt_logprobs")


async def test_priority_is_taken_by_a_server_with_priorities() -> None:
    async with serving(scheduling_policy="priority") as served:
        await served.completed(priority=-3)


async def test_null_means_absent_and_harmless_defaults_are_taken(shared: Served) -> None:
    nulls = dict.fromkeys(
        (
            "stop",
            "logprobs",
            "suffix",
            "best_of",
            "logit_bias",
            "seed",
            "n",
            "stream",
            "echo",
            "response_format",
            "structured_outputs",
            "guided_json",
            "stream_options",
            "user",
        )
    )
    await shared.completed(**nulls)
    await shared.completed(
        logit_bias={},
        foo=1,
        user="u",
        suffix="",
        best_of=1,
        use_beam_search=False,
        response_format={"type": "text"},
        structured_outputs={"json": None},
        presence_penalty=0,
        n=1.0,
        stop=[],
        length_penalty=1.0,
    )
    await shared.chatted(
        **{**nulls, "tools": [], "tool_choice": "none", "top_logprobs": 0, "modalities": ["text"]},
    )


async def test_unknown_model_is_a_404_that_names_it(shared: Served) -> None:
    for is_streamed in (False, True):
        for answer in (
            await shared.chat(model="no-such-model", stream=is_streamed),
            await shared.complete(model="no-such-model", stream=is_streamed),
        ):
            assert answer.status == 404
            assert answer.error["code"] == "model_not_found"
            assert "no-such-model" in answer.error["message"]


async def test_model_may_be_left_out_and_aliases_are_kept(shared: Served) -> None:
    assert (await shared.chatted(model=None))["model"] == MODEL
    assert (await shared.chatted(model="org/alias"))["model"] == "org/alias"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"[]", b"null", b"123", b'"str"', b"true", b'{"a":', b"{'a': 1}", b"\xff\xfe"),
        *(b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}'),
        *(b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"[" * 100_000, b'{"a":' * 50_000),
        b'{"messages": [' + b'{"a": [' * 600 + b"]}" * 600 + b"]}",
    ],
    ids=lambda body: repr(body[:20]),
)
async def test_broken_json_is_a_400(shared: Served, path: str, body: bytes) -> None:
    answer = await shared.request("POST", path, data=body, headers=JSON)

    assert answer.status == 400
    assert answer.error["message"]


async def test_body_of_some_megabytes_is_served(shared: Served) -> None:
    body = json.dumps({"model": MODEL, "prompt": "ab", "max_tokens": 2, "temperature": 0})
    padded = io.BytesIO((body[:-1] + " " * 10_000_000 + "}").encode())

    answer = await shared.request("POST", COMPLETIONS, data=padded, headers=JSON)

    assert answer.json["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("prompt", ["word " * 100_000, [97] * 1_000_000], ids=["text", "token ids"])
async def test_huge_prompt_is_refused_while_others_are_served(shared: Served, prompt: Any) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
    heartbeat = Heartbeat()
    reader, writer = await asyncio.open_connection(*shared.host_port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    async with heartbeat.running():
        line = await asyncio.wait_for(reader.readline(), 30)
    writer.close()

    assert b"400" in line
    assert heartbeat.longest_s < scaled(0.1)


async def test_body_over_the_limit_is_a_413() -> None:
    async with serving(max_request_bytes=10_000) as served:
        sized = await served.complete("x" * 20_000)

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 1000

        chunked = await served.request("POST", COMPLETIONS, data=pieces(), headers=JSON)

        assert (sized.status, chunked.status) == (413, 413)
        assert "10000" in sized.error["message"]
        assert "10000" in chunked.error["message"]


async def test_too_many_choices_in_one_request_are_refused(shared: Served) -> None:
    assert_refused(await shared.complete(["a"] * 4097), "prompt")


async def test_body_of_too_many_values_is_a_413(shared: Served) -> None:
    body = io.BytesIO(b'{"prompt": [' + b"0," * 1_000_100 + b"0]}")

    answer = await shared.request("POST", COMPLETIONS, data=body, headers=JSON)

    assert answer.status == 413
    assert "1000000 values" in answer.error["message"]


async def test_text_that_can_never_fit_is_refused_before_it_is_tokenized(shared: Served) -> None:
    text = "x" * 500_000
    for answer in (await shared.complete(text), await shared.chat(text)):
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert "500000 characters" in answer.error["message"]


async def test_text_may_be_long_where_it_is_truncated(shared: Served) -> None:
    answer = await shared.complete("x" * 100_000, truncate_prompt_tokens=5)

    assert answer.json["usage"]["prompt_tokens"] == 5


async def test_repetition_penalty_beyond_its_range_is_refused(shared: Served) -> None:
    for value in (5e-324, 1e308):
        answer = await shared.complete(repetition_penalty=value)
        assert answer.status == 400
        assert answer.error["param"] == "repetition_penalty"
