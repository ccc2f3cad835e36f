"""Stored responses: continued, read, listed, cancelled, deleted, and bounded in number and size."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from llmserve.api.openai_responses.store import ResponseStore, StoredResponse
from llmserve.errors import RequestError
from tests.server.harness import KEY, MODEL, Served, serving
from tests.server.scripted_runner import END


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


async def say(api: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
    return await api.responses.create(
        model=MODEL, input=f"{text}{END}", temperature=0, max_output_tokens=50, **fields
    )


def make_stored(previous_id: str | None = None, num_bytes: int = 6) -> StoredResponse:
    part = b"1" * (num_bytes // 3)
    return StoredResponse(part, part, part, previous_id)


def is_kept(store: ResponseStore, response_id: str) -> bool:
    try:
        store.get(response_id)
    except RequestError:
        return False
    return True


async def test_conversation_goes_on_from_the_previous_response(served: Served) -> None:
    async with client(served) as api:
        first = await say(api, "a")
        second = await say(api, "b", previous_response_id=first.id)
        third = await say(api, "c", previous_response_id=second.id)
        counted = await api.responses.input_tokens.count(
            model=MODEL, input="d", previous_response_id=third.id
        )

    # The template writes contents one after the other: every prompt is all that came before.
    assert first.usage.input_tokens == len("^a.")
    assert second.usage.input_tokens == len("^a.ab.")
    assert third.usage.input_tokens == len("^a.ab.ac.")
    assert counted.input_tokens == len("^a.ab.ac.ad")
    assert third.previous_response_id == second.id


async def test_response_is_read_listed_and_deleted(served: Served) -> None:
    async with client(served) as api:
        made = await say(api, "a")
        read = await api.responses.retrieve(made.id)
        listed = await api.responses.input_items.list(made.id)
        await api.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError) as error:
            await say(api, "b", previous_response_id=made.id)

    assert read.model_dump() == made.model_dump()
    assert listed.data[0].content[0].text == f"a{END}"  # type: ignore[union-attr]
    assert isinstance(error.value.body, dict)
    assert error.value.body["param"] == "previous_response_id"


async def test_input_items_come_in_pages(served: Served) -> None:
    items = [{"role": "user", "content": text, "id": f"m{text}"} for text in "abc"]
    body = (await served.post("/v1/responses", {"input": items, "max_output_tokens": 1})).json
    path = f"/v1/responses/{body['id']}/input_items"

    newest = (await served.get(f"{path}?limit=2")).json
    rest = (await served.get(f"{path}?limit=2&after={newest['last_id']}")).json
    forward = (await served.get(f"{path}?order=asc")).json
    wrong = [await served.get(f"{path}?{query}") for query in ("limit=0", "order=up", "after=z")]

    assert [item["id"] for item in newest["data"]] == ["mc", "mb"]
    assert (newest["has_more"], rest["has_more"]) == (True, False)
    assert [item["id"] for item in rest["data"]] == ["ma"]
    assert [item["id"] for item in forward["data"]] == ["ma", "mb", "mc"]
    assert [answer.error["param"] for answer in wrong] == ["limit", "order", "after"]


async def test_store_false_stores_nothing(served: Served) -> None:
    async with client(served) as api:
        made = await say(api, "a", store=False)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(made.id)

    assert made.store is False


async def test_server_without_a_store_says_so() -> None:
    async with serving(response_store_size=0) as served:
        asked = await served.post("/v1/responses", {"input": f"a{END}", "store": True})
        read = await served.get(f"/v1/responses/{asked.json['id']}")

    assert asked.json["store"] is False
    assert asked.headers["X-Ignored-Params"] == "store"
    assert "--response-store-size" in read.error["message"]


async def test_running_response_is_read_and_cancelled(served: Served) -> None:
    served.runner.delay_s = 0.005
    async with client(served) as api:
        stream = await api.responses.create(model=MODEL, input="ab", stream=True)
        created = await anext(aiter(stream))
        assert created.type == "response.created"
        running = await api.responses.retrieve(created.response.id)
        cancelled = await api.responses.cancel(created.response.id)
        last = [event async for event in stream][-1]
        read = await api.responses.retrieve(created.response.id)
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await api.responses.cancel(created.response.id)

    await served.wait_idle()
    assert running.status == "in_progress"
    assert cancelled.status == "cancelled"
    assert last.type == "response.incomplete"
    assert last.response.status == read.status == "cancelled"
    assert read.usage is not None
    assert read.usage.output_tokens < 200


def test_store_drops_what_was_used_longest_ago() -> None:
    store = ResponseStore(2, 100)
    store.put("a", make_stored())
    store.put("b", make_stored())
    store.get("a")
    store.put("c", make_stored())

    assert [is_kept(store, name) for name in "abc"] == [True, False, True]


def test_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(100, 20)
    for name in "abcd":
        store.put(name, make_stored())
    store.put("huge", make_stored(num_bytes=30))

    assert [is_kept(store, name) for name in "abcd"] == [False, True, True, True]
    assert not is_kept(store, "huge")
    store.delete("b")
    store.put("e", make_stored())
    assert [is_kept(store, name) for name in "cde"] == [True] * 3


def test_store_keeps_what_a_newer_response_continues() -> None:
    store = ResponseStore(3, 100)
    store.put("a", make_stored())
    store.put("x", make_stored())
    store.put("b", make_stored("a"))
    store.put("c", make_stored("b"))

    assert [is_kept(store, name) for name in "xabc"] == [False, True, True, True]
    assert len(store.history("c")) == 6
    store.delete("a")
    with pytest.raises(RequestError, match="'a'"):
        store.history("c")
