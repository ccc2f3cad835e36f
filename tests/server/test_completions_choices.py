"""How choices are made and chosen: best_of, beam search, streams of echoed prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llmserve.core import TokenLogprobs
from tests.server import scripted_runner
from tests.server.harness import MODEL, Served, wait_for
from tests.server.scripted_runner import LOGPROB

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def refusal(answer: Any) -> tuple[int, str | None]:
    return answer.status, answer.error["param"]


async def test_best_of_chooses_by_mean_logprob_and_counts_all(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Choice i writes the alphabet from letter i on; later letters are likelier here.
    monkeypatch.setattr(
        scripted_runner,
        "logprobs_of",
        lambda token_id, k: TokenLogprobs(token_id, -1.0 / token_id, 1),
    )

    body = await served.completed(ALPHABET, best_of=5, n=2, temperature=1, seed=0, max_tokens=3)

    assert [choice["text"] for choice in body["choices"]] == ["efg", "def"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 15
    assert body["usage"]["prompt_tokens"] == 27


async def test_best_of_chooses_for_every_prompt(served: Served) -> None:
    body = await served.completed(
        ["abcd", "efgh"], best_of=3, n=1, temperature=1, seed=1, max_tokens=2, logprobs=1
    )

    # All candidates are equally likely, so the first of each prompt is chosen.
    assert [choice["text"] for choice in body["choices"]] == ["bc", "fg"]
    assert body["choices"][1]["logprobs"]["token_logprobs"] == [LOGPROB, LOGPROB]
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 128, "prompt": ["a"] * 33}, "prompt"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
        ({"use_beam_search": True, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
    ],
)
async def test_combinations_without_meaning_are_refused(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await served.complete(**{"temperature": 1, **fields})

    assert refusal(answer) == (400, param)
    assert param in answer.error["message"]


async def test_best_of_equal_to_n_may_be_streamed(served: Served) -> None:
    answer = await served.complete(best_of=2, n=2, temperature=1, stream=True)

    assert {event["choices"][0]["index"] for event in answer.events} == {0, 1}


async def test_beams_come_best_first_and_are_counted(served: Served) -> None:
    # Each step is a request of its own, for which the scripted model finds the prompt's first
    # letter likeliest and each letter after it less likely by one.
    body = await served.completed("abc", use_beam_search=True, n=3, max_tokens=2, logprobs=2)

    choices = body["choices"]
    assert [choice["text"] for choice in choices] == ["aa", "ab", "ba"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
    assert choices[1]["logprobs"]["token_logprobs"] == [LOGPROB, LOGPROB - 1]
    assert choices[1]["logprobs"]["top_logprobs"][1] == {"a": LOGPROB, "b": LOGPROB - 1}
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == 4


async def test_beams_of_many_prompts_with_echo(served: Served) -> None:
    body = await served.completed(
        ["abc", "xyz"], use_beam_search=True, n=2, max_tokens=2, echo=True, logprobs=1
    )

    assert [c["text"] for c in body["choices"]] == ["abcaa", "abcab", "xyzxx", "xyzxy"]
    assert [len(c["logprobs"]["tokens"]) for c in body["choices"]] == [6] * 4
    assert body["choices"][3]["logprobs"]["token_logprobs"][0] is None


async def test_more_beams_than_choices_may_be_searched(served: Served) -> None:
    body = await served.completed("abc", use_beam_search=True, n=1, best_of=3, max_tokens=2)

    assert [choice["text"] for choice in body["choices"]] == ["aa"]


async def test_chat_searches_beams_too(served: Served) -> None:
    body = await served.chatted("abc", use_beam_search=True, n=2, max_tokens=2)

    contents = [choice["message"]["content"] for choice in body["choices"]]
    assert contents == ["aa", "ab"]
    assert body["usage"]["completion_tokens"] == 4


async def test_stop_string_ends_beams(served: Served) -> None:
    body = await served.completed("abc", use_beam_search=True, n=2, max_tokens=8, stop="a")

    assert [choice["text"] for choice in body["choices"]] == ["", "b"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert {choice["stop_reason"] for choice in body["choices"]} == {"a"}


async def test_beam_search_reuses_the_cache_of_its_prompt(served: Served) -> None:
    prompt = "a long prompt that fills some blocks " * 4
    await served.completed(prompt, use_beam_search=True, n=2, max_tokens=8)

    hits = served.engine.stats.prefix_cache_hits._value.get()
    assert hits > 15 * 128  # two beams in seven later steps, and this is most of the prompt


async def test_departed_client_ends_its_beam_search(served: Served) -> None:
    served.runner.delay_s = 0.02
    body = {
        "model": MODEL,
        "prompt": "abc",
        "max_tokens": 400,
        "use_beam_search": True,
        "n": 4,
        "temperature": 0,
    }
    task = asyncio.create_task(served.post("/v1/completions", body))
    await wait_for(lambda: served.engine.num_unfinished > 0)

    task.cancel()

    await asyncio.gather(task, return_exceptions=True)
    await wait_for(lambda: not served.engine._beam_searches)
    await served.wait_idle()


async def test_failed_step_fails_its_beam_search(served: Served) -> None:
    served.runner.fail_next = True

    answer = await served.complete("abc", use_beam_search=True, n=2)

    assert answer.status == 500
    assert "forward pass" in answer.error["message"]
    await served.completed("abc")


async def test_beam_search_under_way_outlives_the_order_to_stop(served: Served) -> None:
    served.runner.delay_s = 0.005
    task = asyncio.create_task(served.completed("abc", use_beam_search=True, n=2, max_tokens=30))
    await wait_for(lambda: served.engine.num_unfinished > 0)

    await served.engine.drain(10)
    assert not served.engine._beam_searches

    assert len((await task)["choices"]) == 2


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"use_beam_search": True, "temperature": 0}, None),
        (
            {"use_beam_search": True, "temperature": 0.7, "top_p": 0.5, "seed": 1},
            "seed, temperature, top_p",
        ),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
async def test_fields_that_the_others_make_void_are_listed(
    served: Served, fields: dict[str, Any], ignored: str | None
) -> None:
    answer = await served.complete(**fields)

    assert answer.status == 200
    assert answer.headers.get("X-Ignored-Params") == ignored


async def test_streamed_choices_each_begin_with_the_scored_prompt(served: Served) -> None:
    fields: dict[str, Any] = {
        "prompt": ["abc", "defg"],
        "echo": True,
        "logprobs": 1,
        "n": 2,
        "temperature": 1,
        "seed": 0,
        "max_tokens": 2,
    }
    whole = await served.completed(**fields)

    answer = await served.complete(stream=True, **fields)

    rows: dict[int, list[Any]] = {}
    texts: dict[int, str] = {}
    for event in answer.events:
        [choice] = event["choices"]
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        if choice["logprobs"]:
            rows[index] = rows.get(index, []) + choice["logprobs"]["token_logprobs"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert rows == {
        choice["index"]: choice["logprobs"]["token_logprobs"] for choice in whole["choices"]
    }
    assert len(rows[3]) == 7
