"""OpenAI's own Python client against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.harness import KEY, MODEL, Served, serving
from tests.server.scripted_runner import END

MESSAGES: Any = [{"role": "user", "content": f"hé🙂{END}"}]


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


async def test_chat_streamed_and_not(served: Served) -> None:
    async with client(served) as api:
        whole = await api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == "hé🙂"
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_chunks_accumulate_with_the_clients_helper(served: Served) -> None:
    async with (
        client(served) as api,
        api.chat.completions.stream(
            model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=1
        ) as stream,
    ):
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == "hé🙂"
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == 8


async def test_legacy_completions(served: Served) -> None:
    async with client(served) as api:
        body = await api.completions.create(
            model=MODEL, prompt=["ab", "cd"], max_tokens=3, temperature=0, logprobs=1, echo=True
        )

    assert [choice.text for choice in body.choices] == ["ababa", "cdcdc"]
    assert body.choices[0].logprobs is not None
    assert body.choices[0].logprobs.tokens == ["", "a", "b", "a", "b", "a"]


async def test_leaving_a_stream_aborts_it(served: Served) -> None:
    served.runner.delay_s = 0.01
    async with client(served) as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "ab"}], stream=True
        )
        async for _ in stream:
            break
        await stream.close()

    await served.wait_idle()


async def test_errors_become_the_clients_exceptions(served: Served) -> None:
    async with client(served) as api:
        with pytest.raises(openai.NotFoundError) as not_found:
            await api.chat.completions.create(model="none", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-3)
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("none")

    assert not_found.value.code == "model_not_found"
    assert isinstance(bad.value.body, dict)
    assert bad.value.body["param"] == "temperature"


async def test_error_inside_a_stream_raises_in_the_client(served: Served) -> None:
    served.runner.hold()
    async with client(served) as api:
        stream = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        served.runner.fail_next = True
        served.runner.release()
        with pytest.raises(openai.APIError, match="forward pass"):
            async for _ in stream:
                pass


async def test_wrong_key_raises_authentication_error() -> None:
    async with serving(api_key=("sk-other",)) as served, client(served) as api:
        with pytest.raises(openai.AuthenticationError):
            await api.models.list()


async def test_synchronous_client(served: Served) -> None:
    def run() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as api:
            whole = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
            stream = api.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, text, [m.id for m in api.models.list()]

    whole, streamed, names = await asyncio.to_thread(run)

    assert whole == streamed == "hé🙂"
    assert names == [MODEL, "org/alias"]
