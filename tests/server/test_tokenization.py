"""/tokenize and /tokenizer_info; that large texts hold up nothing."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from typing import Any

import aiohttp
import pytest

from llmserve.api import tokenization
from llmserve.api.work_gate import WorkGate
from llmserve.tokenizer import ChunkedEncoder
from tests.pauses import Heartbeat, scaled
from tests.server.harness import MAX_MODEL_LEN, TEMPLATE, Answer, Served, serving, wait_for
from tests.server.scripted_runner import BOS_ID

USER = {"role": "user", "content": "ab"}
REPLY = {"role": "assistant", "content": "cd"}


def ids(text: str) -> list[int]:
    return [BOS_ID, *text.encode()]


async def tokens(served: Served, **fields: Any) -> list[int]:
    answer = await served.post("/tokenize", fields)
    assert answer.status == 200, answer.raw
    assert answer.json["count"] == len(answer.json["tokens"])
    assert answer.json["max_model_len"] == MAX_MODEL_LEN
    found: list[int] = answer.json["tokens"]
    return found


async def post_large(served: Served, prompt: str, **kwargs: Any) -> Answer:
    """aiohttp's client warns of large bodies that are not files."""
    body = io.BytesIO(json.dumps({"prompt": prompt}).encode())
    headers = {"Content-Type": "application/json"}
    return await served.request("POST", "/tokenize", data=body, headers=headers, **kwargs)


async def test_the_answer_has_strings_only_if_they_are_asked_for(served: Served) -> None:
    plain = (await served.post("/tokenize", {"prompt": "ab"})).json
    both = (await served.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json

    assert plain == {"count": 3, "max_model_len": MAX_MODEL_LEN, "tokens": ids("ab")}
    assert both == {**plain, "token_strs": ["<bos>", "a", "b"]}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"add_generation_prompt": False}, "ab"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "ab TOOLS f!"),
        ({"messages": [USER, REPLY], "continue_final_message": True}, "abcd"),
        ({"chat_template_kwargs": {"suffix": "?"}}, "ab?"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "ab"),
        ({"chat_template_kwargs": {"documents": [], "continue_final_message": None}}, "ab!"),
        (
            {"messages": [USER, REPLY], "chat_template_kwargs": {"continue_final_message": True}},
            "abcd",
        ),
        (
            {
                "add_generation_prompt": True,
                "chat_template_kwargs": {"add_generation_prompt": False, "suffix": "?"},
            },
            "ab?",
        ),
    ],
)
async def test_a_conversation_is_rendered_as_the_fields_say(
    fields: dict[str, Any], text: str
) -> None:
    async with serving(chat_template_kwargs='{"suffix": "!"}') as served:
        made = {"messages": [USER], **fields}
        assert await tokens(served, **made) == ids(text)


@pytest.mark.parametrize(
    ("variables", "param"),
    [
        ({"documents": 5}, "documents"),
        ({"add_generation_prompt": "x"}, "add_generation_prompt"),
        ({"tools": [1]}, "chat_template_kwargs"),
    ],
)
async def test_variables_that_are_fields_are_checked_as_these(
    served: Served, variables: dict[str, Any], param: str
) -> None:
    body = {"messages": [USER], "chat_template_kwargs": variables}

    for path in ("/tokenize", "/v1/chat/completions", "/v1/chat/completions/render"):
        answer = await served.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_special_tokens_can_be_left_out(served: Served) -> None:
    assert await tokens(served, messages=[USER], add_special_tokens=False) == list(b"ab")
    assert await tokens(served, messages=[USER], add_special_tokens=True) == ids("ab")
    assert await tokens(served, prompt="ab", add_special_tokens=False) == list(b"ab")


async def test_a_template_of_the_request_needs_a_trusting_server(served: Served) -> None:
    body = {"messages": [USER], "chat_template": "mine"}

    refused = await served.post("/tokenize", body)
    async with serving(trust_request_chat_template=True) as trusting:
        allowed = await tokens(trusting, **body)

    assert refused.status == 400
    assert refused.error["param"] == "chat_template"
    assert allowed == ids("mine")


async def test_both_a_new_turn_and_a_continued_one_are_refused(served: Served) -> None:
    answer = await served.post(
        "/tokenize",
        {"messages": [REPLY], "continue_final_message": True, "add_generation_prompt": True},
    )

    assert answer.status == 400
    assert answer.error["param"] == "continue_final_message"


@pytest.mark.parametrize("text", ["Two words\nand a line. " * 3, "x" * 70, "ж\n" * 40 + "ж"])
async def test_a_long_text_has_the_tokens_of_a_short_one(
    served: Served, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (await served.post("/tokenize", {"prompt": text, "return_token_strs": True})).json
    chat = await tokens(served, messages=[{"role": "user", "content": text}])
    bare = await tokens(served, prompt=text, add_special_tokens=False)
    monkeypatch.setattr(tokenization, "_LONG_CHARS", 8)
    monkeypatch.setattr(tokenization, "_PIECE_BYTES", 16)
    monkeypatch.setattr(ChunkedEncoder, "chunk_chars", 8)

    assert (
        await served.post("/tokenize", {"prompt": text, "return_token_strs": True})
    ).json == short
    assert await tokens(served, messages=[{"role": "user", "content": text}]) == chat
    assert await tokens(served, prompt=text, add_special_tokens=False) == bare


async def test_megabytes_are_tokenized_without_holding_up_others(served: Served) -> None:
    text = "some words in a line " * 100_000
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begin = time.process_time()
            await served.get("/version")
            longest = max(longest, time.process_time() - begin)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(*(post_large(served, text) for _ in range(3)))
    watching.cancel()

    assert [answer.json["count"] for answer in answers] == [len(text) + 1] * 3
    assert longest < scaled(0.5)


async def test_only_two_large_texts_are_in_work_at_once() -> None:
    gate = WorkGate()
    go_on = threading.Event()
    running = 0

    def work() -> None:
        nonlocal running
        running += 1
        go_on.wait(10)

    waiting = [asyncio.create_task(gate.run(1 << 20, work)) for _ in range(4)]
    await wait_for(lambda: running == 2)
    small = await gate.run(100, lambda: "done")
    waiting[3].cancel()
    await asyncio.sleep(0.05)
    assert (running, small) == (2, "done")
    go_on.set()
    await asyncio.gather(*waiting[:3])
    gate.close()

    assert running == 3


async def test_work_ends_when_its_client_leaves(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkedEncoder, "chunk_chars", 1 << 10)
    num_words = 1_000_000
    before = threading.active_count()
    done = threading.Event()
    encode = ChunkedEncoder.encode
    pieces = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal pieces
        try:
            for piece in encode(*args, **kwargs):
                pieces += 1
                time.sleep(0.001)
                yield piece
        finally:
            done.set()

    monkeypatch.setattr(ChunkedEncoder, "encode", counting)
    timeout = aiohttp.ClientTimeout(total=1)
    with pytest.raises(TimeoutError):
        await post_large(served, "word " * num_words, timeout=timeout)
    await wait_for(done.is_set)

    assert 0 < pieces < 2000  # of 4800
    assert threading.active_count() <= before + 2


async def test_a_rendering_that_takes_long_leaves_the_event_loop() -> None:
    slow = "{% for i in range(99999) %}{% endfor %}" * 6 + TEMPLATE  # 0.25 s
    heartbeat = Heartbeat()
    async with serving(template=slow) as served, heartbeat.running():
        for _ in range(2):
            assert await tokens(served, messages=[USER]) == ids("ab")
            assert (await served.chatted("ab"))["usage"]["prompt_tokens"] == 3

    assert heartbeat.longest_s < scaled(0.1)


async def test_the_tokenizer_describes_itself_if_the_server_allows_it() -> None:
    async with serving(enable_tokenizer_info_endpoint=True) as served:
        info = (await served.get("/tokenizer_info")).json

    assert info["tokenizer_class"] == "BosTokenizer"
    assert info["model_max_length"] == MAX_MODEL_LEN
    assert info["bos_token_id"] == BOS_ID
    assert info["chat_template"] == TEMPLATE
    assert info["added_tokens_decoder"][str(BOS_ID)] == {"content": "<bos>", "special": True}


async def test_the_tokenizer_is_not_described_unasked(served: Served) -> None:
    answer = await served.get("/tokenizer_info")

    assert answer.status == 404
    assert "--enable-tokenizer-info-endpoint" in answer.error["message"]
