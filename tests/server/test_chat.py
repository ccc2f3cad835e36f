"""POST /v1/chat/completions, unstreamed: shape, conversation forms, templates, tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MAX_MODEL_LEN, MODEL, Served, serving
from tests.server.scripted_runner import BOS_ID, END, LOGPROB

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}


async def say(served: Served, messages: Any, **fields: Any) -> dict[str, Any]:
    answer = await served.post(
        CHAT,
        {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **fields},
    )
    assert answer.status == 200, answer.raw
    return answer.json


async def test_answer_has_the_shape_that_clients_read(served: Served) -> None:
    answer = await served.chat(f"hi{END}")

    body = answer.json
    assert body["id"] == f"chatcmpl-{answer.headers['X-Request-Id']}"
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["completion_tokens"] == 3


async def test_output_may_fill_the_context_by_default(served: Served) -> None:
    body = await served.chatted("ab", max_tokens=None)

    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert body["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_wins_over_max_tokens(served: Served) -> None:
    body = await served.chatted("ab", max_tokens=9, max_completion_tokens=3)

    assert body["usage"]["completion_tokens"] == 3


async def test_text_parts_reach_the_template_in_order(served: Served) -> None:
    parts = [{"type": "text", "text": "part-A"}, {"type": "text", "text": "part-B"}]

    tokens = (
        await served.post("/tokenize", {"messages": [{"role": "user", "content": parts}]})
    ).json["tokens"]

    text = bytes(token for token in tokens if token < 256).decode()
    assert text.index("part-A") < text.index("part-B")
    assert "type" not in text


async def test_template_that_raises_is_a_400_with_its_words(served: Served) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    for is_streamed in (False, True):
        answer = await served.post(
            CHAT, {"model": MODEL, "messages": messages, "stream": is_streamed}
        )
        assert answer.status == 400
        assert "takes no system turn" in answer.error["message"]


async def test_prompt_has_one_bos(served: Served) -> None:
    messages = [{"role": "user", "content": "ab"}]
    tokens = (await served.post("/tokenize", {"messages": messages})).json["tokens"]

    body = await say(served, messages)

    assert tokens == [BOS_ID, 97, 98]
    assert body["usage"]["prompt_tokens"] == 3


async def test_continued_message_keeps_its_role_and_is_not_repeated(served: Served) -> None:
    messages = [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "1, 2,"},
    ]

    body = await say(served, messages, continue_final_message=True)

    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"].startswith("count1, 2,")  # the runner's way


async def test_continuing_and_starting_a_message_exclude_each_other(served: Served) -> None:
    answer = await served.chat(add_generation_prompt=True, continue_final_message=True)

    assert (answer.status, answer.error["param"]) == (400, "continue_final_message")


async def test_template_kwargs_reach_the_template(served: Served) -> None:
    body = await served.chatted("ab", chat_template_kwargs={"suffix": "XY"}, max_tokens=4)

    assert body["choices"][0]["message"]["content"] == "abXY"


@pytest.mark.parametrize("name", ["messages", "tools"])
async def test_template_kwargs_cannot_replace_the_conversation(served: Served, name: str) -> None:
    answer = await served.chat(chat_template_kwargs={name: [1]})

    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")


async def test_template_in_a_request_needs_trust(served: Served) -> None:
    answer = await served.chat(chat_template="{{ messages[0].content }}!")

    assert (answer.status, answer.error["param"]) == (400, "chat_template")


async def test_trusted_template_in_a_request_is_used() -> None:
    async with serving(trust_request_chat_template=True) as served:
        body = await served.chatted("ab", chat_template="{{ messages[0].content }}!", max_tokens=3)

        assert body["choices"][0]["message"]["content"] == "ab!"


async def test_broken_trusted_template_is_a_400() -> None:
    async with serving(trust_request_chat_template=True) as served:
        answer = await served.chat(chat_template="{% for %}")

        assert answer.status == 400


async def test_response_role_is_the_servers() -> None:
    async with serving(response_role="bot") as served:
        body = await served.chatted()
        events = (await served.chat(stream=True)).events

        assert body["choices"][0]["message"]["role"] == "bot"
        assert events[0]["choices"][0]["delta"]["role"] == "bot"


async def test_conversation_with_tool_calls_is_taken(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]

    body = await say(served, messages, tools=[TOOL])

    assert body["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("choice", ["none", "auto", None])
async def test_tools_reach_the_template(served: Served, choice: str | None) -> None:
    body = await served.chatted("ab", tools=[TOOL], tool_choice=choice, max_tokens=13)

    assert body["choices"][0]["message"]["content"] == "ab TOOLS lamp"
    assert "tool_calls" not in body["choices"][0]["message"]


async def test_logprobs_have_a_row_per_token_and_join_to_the_content(served: Served) -> None:
    body = await served.chatted(f"hé{END}", logprobs=True, top_logprobs=2)

    choice = body["choices"][0]
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert [row["logprob"] for row in rows] == [LOGPROB] * 4
    assert rows[0]["top_logprobs"] == [
        {"token": "h", "logprob": LOGPROB, "bytes": [104]},
        {"token": "i", "logprob": LOGPROB - 1, "bytes": [105]},
    ]
    joined = b"".join(bytes(row["bytes"]) for row in rows)
    assert joined.decode() == choice["message"]["content"]


async def test_logprobs_without_top_logprobs_have_empty_lists(served: Served) -> None:
    body = await served.chatted("ab", logprobs=True, max_tokens=2)

    rows = body["choices"][0]["logprobs"]["content"]
    assert [row["top_logprobs"] for row in rows] == [[], []]


async def test_prompt_logprobs_and_token_ids(served: Served) -> None:
    body = await served.chatted("ab", prompt_logprobs=1, return_token_ids=True, max_tokens=2)

    assert body["prompt_token_ids"] == [BOS_ID, 97, 98]
    assert body["choices"][0]["token_ids"] == [97, 98]
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1] == {
        "97": {"logprob": LOGPROB, "rank": 1, "decoded_token": "a"}
    }


async def test_n_choices_have_their_own_seeds(served: Served) -> None:
    body = await served.chatted("abc", n=3, temperature=1, seed=0, max_tokens=3)

    contents = [choice["message"]["content"] for choice in body["choices"]]
    assert contents == ["abc", "bca", "cab"]


async def test_model_defaults_come_before_neutral_ones() -> None:
    async with serving(
        generation_config={"temperature": 0.5, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 100]}
    ) as served:
        await served.chatted(temperature=None)
        await served.chatted(temperature=1.5, top_k=-1, top_p=1, min_p=0.1)
        defaults, asked = served.runner.sampling_seen

        assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.5, 64, 0.95)
        assert (asked.temperature, asked.top_k, asked.top_p) == (1.5, 0, 1.0)
        assert (defaults.min_p, asked.min_p) == (0.0, 0.1)
        assert set(defaults.eos_token_ids) == {256, 1, 100}


async def test_sampling_fields_arrive_in_the_engine(served: Served) -> None:
    await served.chatted(
        temperature=0.001,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"97": 5, "98": -100},
        allowed_token_ids=[99, 98, 99],
        bad_words=["bad"],
        stop_token_ids=[7],
        min_tokens=2,
        ignore_eos=True,
        seed=-5,
        skip_special_tokens=False,
    )

    (params,) = served.runner.sampling_seen
    assert params.temperature == 0.01
    assert params.presence_penalty == 0.5
    assert params.frequency_penalty == -0.5
    assert params.repetition_penalty == 1.25
    assert params.logit_bias == ((97, 5.0), (98, -100.0))
    assert params.allowed_token_ids == (98, 99)
    assert params.bad_words_token_ids == (tuple(b"bad"), tuple(b" bad"))
    assert params.stop_token_ids == (7,)
    assert (params.min_tokens, params.max_tokens) == (2, 8)
    assert params.eos_token_ids == ()
    assert params.skip_special_tokens is False


async def test_fields_without_effect_are_named_in_a_header(served: Served) -> None:
    answer = await served.chat(user="u", foo=1, metadata={"a": "b"}, store=None, seed=1)
    stream = await served.chat(user="u", stream=True)

    assert answer.headers["X-Ignored-Params"] == "foo, metadata, user"
    assert stream.headers["X-Ignored-Params"] == "user"


async def test_request_id_field_names_the_answer(served: Served) -> None:
    bodies = [await served.chatted(request_id="mine") for _ in range(2)]

    assert [body["id"] for body in bodies] == ["chatcmpl-mine"] * 2


async def test_bos_can_be_left_out(served: Served) -> None:
    body = await served.chatted("ab", add_special_tokens=False, return_token_ids=True)

    assert body["prompt_token_ids"] == [97, 98]
