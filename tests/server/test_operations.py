"""Models, probes, metrics, tokenize and detokenize."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmserve import __version__
from llmserve.engine import EngineState
from tests.server.harness import MAX_MODEL_LEN, MODEL, Served, serving, wait_for
from tests.server.scripted_runner import BOS_ID


async def samples(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = await served.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.raw.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_models_are_listed_under_every_name(served: Served) -> None:
    body = (await served.get("/v1/models")).json

    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == [MODEL, "org/alias"]
    for card in body["data"]:
        assert card["object"] == "model"
        assert card["max_model_len"] == MAX_MODEL_LEN
        assert isinstance(card["created"], int)


async def test_model_is_found_by_name_even_with_a_slash(served: Served) -> None:
    assert (await served.get("/v1/models/org/alias")).json["id"] == "org/alias"
    assert (await served.get(f"/v1/models/{MODEL}")).json["id"] == MODEL
    assert (await served.get("/v1/models/none")).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (EngineState.READY, 200),
        (EngineState.STARTING, 503),
        (EngineState.DRAINING, 503),
        (EngineState.DEAD, 503),
    ],
)
async def test_health_tells_whether_requests_are_taken(
    served: Served, state: EngineState, status: int
) -> None:
    served.engine.state = state

    answers = [
        await served.get("/health"),
        await served.get("/ping"),
        await served.request("POST", "/ping"),
    ]

    assert [answer.status for answer in answers] == [status] * 3
    if status == 503:
        assert answers[0].error["type"] == "service_unavailable"
    served.engine.state = EngineState.READY


async def test_version_and_load(served: Served) -> None:
    served.runner.hold()
    assert (await served.get("/version")).json == {"version": __version__}
    assert (await served.get("/load")).json == {"server_load": 0}

    import asyncio

    task = asyncio.create_task(served.complete())
    await wait_for(lambda: served.engine.num_unfinished == 1)
    load = (await served.get("/load")).json
    served.runner.release()
    await task

    assert load == {"server_load": 1}


async def test_token_counters_rise_by_the_usage(served: Served) -> None:
    model = frozenset({("model_name", MODEL)})
    before = await samples(served)

    usage = (await served.completed("some prompt"))["usage"]

    after = await samples(served)
    for name, key in (
        ("generation_tokens", "completion_tokens"),
        ("prompt_tokens", "prompt_tokens"),
    ):
        total = (f"llmserve:{name}_total", model)
        assert after[total] - before[total] == usage[key]


async def test_http_requests_are_counted_by_route(served: Served) -> None:
    await served.completed()
    await served.complete(n=0)
    await served.get("/nope/1")
    await served.get("/nope/2")
    await served.get("/v1/models/none")

    counted = await samples(served)

    def count(handler: str, method: str, status: str) -> float:
        labels = {"handler": handler, "method": method, "status": status}
        return counted["http_requests_total", frozenset(labels.items())]

    assert count("/v1/completions", "POST", "200") == 1
    assert count("/v1/completions", "POST", "400") == 1
    assert count("unknown", "GET", "404") == 2
    assert count("/v1/models/{id}", "GET", "404") == 1
    assert any(name == "http_request_duration_seconds_bucket" for name, _ in counted)
    assert any(name == "process_resident_memory_bytes" for name, _ in counted)


@pytest.mark.parametrize("text", ["Hello, wörld!  Two  spaces\tand\nlines 🧑‍🚀 東京 \\n", ""])
async def test_tokenize_and_back(served: Served, text: str) -> None:
    body = (await served.post("/tokenize", {"prompt": text, "add_special_tokens": False})).json
    back = (await served.post("/detokenize", {"tokens": body["tokens"]})).json

    assert body["count"] == len(body["tokens"]) == len(text.encode())
    assert body["max_model_len"] == MAX_MODEL_LEN
    assert back == {"prompt": text}


async def test_tokenize_adds_special_tokens_by_default(served: Served) -> None:
    body = (await served.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json

    assert body["tokens"] == [BOS_ID, 97, 98]
    assert body["token_strs"] == ["<bos>", "a", "b"]


async def test_tokenize_renders_conversations(served: Served) -> None:
    body = (
        await served.post(
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "ab"}],
                "chat_template_kwargs": {"suffix": "!"},
            },
        )
    ).json

    assert body["tokens"] == [BOS_ID, 97, 98, 33]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404),
        ("/tokenize", {"messages": [{"role": "system", "content": "a"}]}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [258]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": [97], "model": "none"}, 404),
    ],
)
async def test_tokenization_refuses_what_makes_no_sense(
    served: Served, path: str, body: dict[str, Any], status: int
) -> None:
    answer = await served.post(path, body)

    assert answer.status == status
    assert answer.error["message"]


async def test_server_seed_fixes_the_seeds_of_requests_without_one() -> None:
    async def seeds(seed: int | None) -> list[int]:
        async with serving(seed=seed) as served:
            for _ in range(3):
                await served.completed(temperature=1)
            return [sampling.seed for sampling in served.runner.sampling_seen]

    first, again, other = await seeds(7), await seeds(7), await seeds(None)

    assert first == again
    assert len({*first, *other}) == 6
