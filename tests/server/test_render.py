"""Rendered prompts: the text and ids that a generation would have, without one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MODEL, Served
from tests.server.scripted_runner import BOS_ID

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "ab"}


def ids(text: str) -> list[int]:
    return [BOS_ID, *text.encode()]


async def test_a_chat_is_rendered_as_it_would_be_run(served: Served) -> None:
    body = {
        "messages": [USER],
        "max_tokens": 3,
        "temperature": 0.5,
        "seed": 7,
        "stop": "x",
        "logit_bias": {"97": -2},
        "chat_template_kwargs": {"suffix": "!"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "salt",
        "return_token_ids": True,
    }

    rendered = (await served.post(CHAT + "/render", body)).json
    events = (await served.post(CHAT, body)).events

    assert rendered["prompt"] == "ab!"
    assert rendered["token_ids"] == events[0]["prompt_token_ids"] == ids("ab!")
    assert rendered["model"] == MODEL
    assert rendered["stream"] is True
    assert rendered["stream_options"]["include_usage"] is True
    assert rendered["cache_salt"] == "salt"
    assert rendered["priority"] == 0
    sampling = rendered["sampling_params"]
    wanted = {"max_tokens": 3, "temperature": 0.5, "seed": 7, "stop": ["x"], "n": 1}
    assert {name: sampling[name] for name in wanted} == wanted
    assert sampling["logit_bias"] == {"97": -2.0}


async def test_max_tokens_are_what_is_left_of_the_context(served: Served) -> None:
    rendered = (await served.post(CHAT + "/render", {"messages": [USER]})).json

    assert rendered["sampling_params"]["max_tokens"] == 512 - len(ids("ab"))


async def test_each_prompt_of_a_completion_is_rendered(served: Served) -> None:
    prompts = (await served.post(COMPLETIONS + "/render", {"prompt": ["ab", "c"]})).json
    of_ids = (await served.post(COMPLETIONS + "/render", {"prompt": [97, 98]})).json

    assert [p["token_ids"] for p in prompts] == [ids("ab"), ids("c")]
    assert [p["prompt"] for p in prompts] == ["ab", "c"]
    assert len({p["request_id"] for p in prompts}) == 2
    assert [(p["token_ids"], p["prompt"]) for p in of_ids] == [([97, 98], "ab")]


async def test_a_request_for_no_tokens_is_rendered(served: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True}

    (rendered,) = (await served.post(COMPLETIONS + "/render", body)).json

    assert rendered["token_ids"] == ids("ab")
    assert rendered["sampling_params"] is None


async def test_nothing_is_generated(served: Served) -> None:
    await served.post(CHAT + "/render", {"messages": [USER]})
    await served.post(COMPLETIONS + "/render", {"prompt": "ab"})

    assert served.runner.sampling_seen == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [USER], "temperature": 3}, "temperature"),
        (CHAT, {"messages": [{"role": "system", "content": "x"}]}, "messages"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1000}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "model": "none"}, "model"),
    ],
)
async def test_what_would_not_run_is_not_rendered(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    rendered = await served.post(path + "/render", body)
    run = await served.post(path, body)

    assert rendered.status == run.status
    assert rendered.error == run.error
    assert rendered.error["param"] == param
