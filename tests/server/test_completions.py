"""POST /v1/completions, unstreamed: shape of the answer, prompt forms, echo, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MAX_MODEL_LEN, MODEL, Served
from tests.server.scripted_runner import BOS_ID, END, LOGPROB


async def test_answer_has_the_shape_that_clients_read(served: Served) -> None:
    answer = await served.complete("abcd", max_tokens=6)

    body = answer.json
    assert body["id"] == f"cmpl-{answer.headers['X-Request-Id']}"
    assert body["object"] == "text_completion"
    assert isinstance(body["created"], int)
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "text": "abcdab",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_max_tokens_is_16_by_default(served: Served) -> None:
    body = await served.completed("abcd", max_tokens=None)

    assert body["usage"]["completion_tokens"] == 16


async def test_end_token_gives_finish_reason_stop_and_no_text(served: Served) -> None:
    body = await served.completed(f"abc{END}")

    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", None)
    assert body["usage"]["completion_tokens"] == 4


async def test_ignore_eos_goes_on_after_the_end_token(served: Served) -> None:
    body = await served.completed(f"abc{END}", ignore_eos=True, max_tokens=6)

    assert body["choices"][0]["text"] == "abcab"  # the end token itself adds nothing
    assert body["choices"][0]["finish_reason"] == "length"


async def test_min_tokens_defers_the_end(served: Served) -> None:
    body = await served.completed(f"a{END}", min_tokens=4)

    assert body["usage"]["completion_tokens"] >= 4


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("ef", "abcd", "ef"), (["zz", "de"], "abc", "de"), (["zz"], "abcdefab", None)],
)
async def test_text_is_cut_at_a_stop_string(
    served: Served, stop: Any, text: str, reason: str | None
) -> None:
    body = await served.completed("abcdef", stop=stop)

    choice = body["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (text, reason)
    assert choice["finish_reason"] == ("length" if reason is None else "stop")


async def test_stop_string_stays_when_asked_for(served: Served) -> None:
    body = await served.completed("abcdef", stop="ef", include_stop_str_in_output=True)

    assert body["choices"][0]["text"] == "abcdef"


async def test_stop_string_in_an_echoed_prompt_stops_nothing(served: Served) -> None:
    body = await served.completed("abcXYZ", stop="XYZ", echo=True)

    assert body["choices"][0]["text"] == "abcXYZabc"


async def test_stop_token_id_is_the_stop_reason(served: Served) -> None:
    body = await served.completed("abcdef", stop_token_ids=[ord("d")])

    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert choice["stop_reason"] == ord("d")


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [BOS_ID, 97, 98, 99], [[BOS_ID, 97, 98, 99]]])
async def test_all_prompt_forms_mean_the_same(served: Served, prompt: Any) -> None:
    body = await served.completed(prompt, max_tokens=4)

    assert body["choices"][0]["text"] == "abca"
    assert body["usage"]["prompt_tokens"] == 4


async def test_empty_prompt_is_the_bos_alone(served: Served) -> None:
    body = await served.completed("", max_tokens=2)

    assert body["usage"]["prompt_tokens"] == 1


async def test_empty_prompt_without_bos_is_refused(served: Served) -> None:
    answer = await served.complete("", add_special_tokens=False)

    assert (answer.status, answer.error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[97], []], None, 5, {"a": 1}, ["a", 5], [97, "a"], [True], [1.5], [[97.0]]],
)
async def test_malformed_prompts_are_refused(served: Served, prompt: Any) -> None:
    answer = await served.complete(prompt)

    assert answer.status == 400
    assert answer.error["param"].startswith("prompt")


@pytest.mark.parametrize("token_id", [258, 999_999_999, -1, 1 << 70])
async def test_prompt_id_outside_the_vocabulary_is_refused(served: Served, token_id: int) -> None:
    answer = await served.post(
        "/v1/completions", {"model": MODEL, "prompt": [97, token_id], "max_tokens": 1}
    )

    assert answer.status == 400
    assert "prompt" in answer.error["message"]


async def test_choice_index_is_prompt_index_times_n_plus_i(served: Served) -> None:
    body = await served.completed(["ab", "cd"], n=2, temperature=1, seed=0, max_tokens=3)

    texts = {choice["index"]: choice["text"] for choice in body["choices"]}
    # The runner starts one byte later for each seed, and choice i has the seed + i.
    assert texts == {0: "aba", 1: "bab", 2: "cdc", 3: "dcd"}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 12


async def test_prompts_of_a_batch_run_at_the_same_time(served: Served) -> None:
    served.runner.delay_s = 0.02

    body = await served.completed([f"{i}" for i in range(10, 30)], max_tokens=4)

    assert [choice["text"][:2] for choice in body["choices"]] == [str(i) for i in range(10, 30)]
    steps = served.engine.stats.iteration_tokens._sum.get()
    assert steps > 0


async def test_echo_puts_the_prompt_first_once_per_choice(served: Served) -> None:
    body = await served.completed("abc", echo=True, n=2, temperature=1, seed=0, max_tokens=2)

    assert [choice["text"] for choice in body["choices"]] == ["abcab", "abcbc"]


async def test_echo_with_max_tokens_0_gives_the_prompt_alone(served: Served) -> None:
    body = await served.completed("abc", echo=True, max_tokens=0)

    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


async def test_echo_with_max_tokens_0_scores_the_prompt(served: Served) -> None:
    body = await served.completed("abc", echo=True, max_tokens=0, logprobs=1)

    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["", "a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, LOGPROB, LOGPROB, LOGPROB]
    assert body["choices"][0]["text"] == "abc"
    assert body["usage"]["completion_tokens"] == 0


async def test_max_tokens_0_without_echo_is_refused(served: Served) -> None:
    answer = await served.complete(max_tokens=0)

    assert (answer.status, answer.error["param"]) == (400, "max_tokens")


async def test_logprobs_join_to_the_text_and_offsets_step_by_token(served: Served) -> None:
    text = "aé🙂b"

    body = await served.completed(text, max_tokens=8, logprobs=2)

    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == text
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["tokens"] == ["a", "", "é", "", "", "", "🙂", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert logprobs["token_logprobs"] == [LOGPROB] * 8
    assert logprobs["top_logprobs"][0] == {"a": LOGPROB, "b": LOGPROB - 1}
    assert logprobs["top_logprobs"][1] == {"bytes:\\xc3": LOGPROB, "bytes:\\xc4": LOGPROB - 1}


async def test_impossible_tokens_have_logprob_minus_9999(served: Served) -> None:
    body = await served.completed("a", max_tokens=1, logprobs=5)

    assert min(body["choices"][0]["logprobs"]["top_logprobs"][0].values()) == -9999.0


async def test_echo_with_logprobs_covers_prompt_and_output(served: Served) -> None:
    body = await served.completed([BOS_ID, 97, 98], echo=True, logprobs=1, max_tokens=1)

    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["", "a", "b", "a"]
    assert logprobs["token_logprobs"] == [None, LOGPROB, LOGPROB, LOGPROB]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert body["choices"][0]["text"] == "aba"


async def test_prompt_logprobs_of_a_prompt_longer_than_a_step(served: Served) -> None:
    ids = [BOS_ID, *(97 + i % 20 for i in range(299))]

    body = await served.completed(ids, prompt_logprobs=2, max_tokens=1)

    rows = body["choices"][0]["prompt_logprobs"]
    assert len(rows) == 300
    assert rows[0] is None
    assert rows[299][str(ids[299])] == {
        "logprob": LOGPROB,
        "rank": 1,
        "decoded_token": chr(ids[299]),
    }
    assert len(rows[299]) == 2


async def test_tokens_as_ids(served: Served) -> None:
    body = await served.completed(
        "ab", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    )

    choice = body["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:97": LOGPROB}
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_token_ids"] == [BOS_ID, 97, 98]


async def test_prompt_and_budget_fill_the_context_exactly(served: Served) -> None:
    body = await served.completed([97] * (MAX_MODEL_LEN - 4), max_tokens=4)

    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("num_prompt_tokens", [MAX_MODEL_LEN - 3, MAX_MODEL_LEN, 3 * MAX_MODEL_LEN])
async def test_too_long_names_the_numbers_and_the_limit(
    served: Served, num_prompt_tokens: int
) -> None:
    answer = await served.complete([97] * num_prompt_tokens, max_tokens=4)

    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    message = answer.error["message"]
    assert str(num_prompt_tokens) in message
    assert str(MAX_MODEL_LEN) in message
    assert "-" not in message


async def test_default_budget_is_cut_to_what_is_left(served: Served) -> None:
    body = await served.completed([97] * (MAX_MODEL_LEN - 3), max_tokens=None)

    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 2}, "de"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": 500}, "abcde"),
    ],
)
async def test_truncation_keeps_the_asked_side(
    served: Served, fields: dict[str, Any], expected: str
) -> None:
    body = await served.completed(list(b"abcde"), echo=True, max_tokens=0, **fields)

    assert body["choices"][0]["text"] == expected
    assert body["usage"]["prompt_tokens"] == len(expected)


async def test_truncation_to_the_context_leaves_room_for_output(served: Served) -> None:
    body = await served.completed([97] * 2000, truncate_prompt_tokens=-1, max_tokens=4)

    assert body["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 4


async def test_repeated_prompt_reports_cached_tokens(served: Served) -> None:
    prompt = "a long prompt that fills some blocks " * 4
    await served.completed(prompt)

    body = await served.completed(prompt)

    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


async def test_cache_salt_keeps_prompts_apart(served: Served) -> None:
    prompt = "a long prompt that fills some blocks " * 4
    await served.completed(prompt, cache_salt="one")

    body = await served.completed(prompt, cache_salt="two")

    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_seed_decides_and_absent_seeds_differ(served: Served) -> None:
    prompt = "abcdefghijklmnopqrstuvwxyz"
    same = [await served.completed(prompt, temperature=1, seed=7) for _ in range(2)]
    free = [await served.completed(prompt, temperature=1) for _ in range(8)]

    assert same[0]["choices"] == same[1]["choices"]
    assert same[0]["choices"][0]["text"][0] == "h"
    assert len({body["choices"][0]["text"] for body in free}) > 1


async def test_equal_prompts_of_a_batch_without_a_seed_differ(served: Served) -> None:
    body = await served.completed(["abcdefghijklmnopqrstuvwxyz"] * 8, temperature=1)

    assert len({choice["text"] for choice in body["choices"]}) > 1
