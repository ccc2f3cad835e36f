"""Every field of the two generation endpoints: values at the ends of its range are taken, values
beyond are refused by name, and what has no effect is listed or, with --strict-params, refused."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.api.schemas import NO_EFFECT_FIELDS, ChatRequest, CompletionRequest
from tests.server.harness import MODEL, Answer, Served, serving
from tests.server.scripted_runner import VOCAB_SIZE

in_module = pytest.mark.asyncio(loop_scope="module")

LAST_ID = VOCAB_SIZE - 1
INT64 = (1 << 63) - 1
SAMPLED = {"temperature": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# Field: values that are taken, values that are refused.
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "model": ([MODEL, "org/alias"], [5, [MODEL]]),
    "max_tokens": ([1, 508, 2.0], [-1, 10**6, 1.5, "9", True]),
    "temperature": ([0, 1e-9, 2, 1.5], [-0.01, 2.01, "1", True, []]),
    "top_p": ([1, 1e-6, 0.5], [0, 1.01, -1, "x"]),
    "top_k": ([-1, 0, 1, 10**6, 5.0], [-2, 1.5, "9", True]),
    "min_p": ([0, 1], [-0.01, 1.01, "x"]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01, "x"]),
    "frequency_penalty": ([-2, 2], [-2.01, 2.01, "x"]),
    "repetition_penalty": ([0.001, 1, 1000], [0, -1, 1001, "x"]),
    "seed": ([0, 2.0, INT64, -INT64 - 1], [INT64 + 1, -INT64 - 2, -2 * INT64, 1.5, "x"]),
    "stop": (["x", [], ["x"] * 16], ["", [""], ["x"] * 17, 5, [5], {}]),
    "stop_token_ids": ([[], [0, LAST_ID]], [[-1], [LAST_ID + 1], 5, ["a"], [True], [1.5]]),
    "ignore_eos": ([True, False], [1, "yes"]),
    "min_tokens": ([0, 8], [-1, 9, "x"]),
    "include_stop_str_in_output": ([True, False], [0, "x"]),
    "n": ([1, 128, 2.0], [0, 129, -1, 1.5, "two", True]),
    "use_beam_search": ([True, False], [1, "x"]),
    "length_penalty": ([-10, 0, 10], [-11, 11, "x"]),
    "prompt_logprobs": ([0, 20], [-2, -1, 21, "x", True]),
    "logit_bias": (
        [{}, {"0": -100, str(LAST_ID): 100}],
        [[], {"AI": 1}, {str(LAST_ID + 1): 1}, {"5": 100.1}, {"5": "x"}, {"-1": 1}],
    ),
    "allowed_token_ids": ([[0], [0, LAST_ID]], [[], [-1], [LAST_ID + 1], "x", [1.5]]),
    "bad_words": ([[], ["x y", " z"]], ["x", [""], [5]]),
    "stream": ([True, False], [1, "true"]),
    "skip_special_tokens": ([True, False], [1, "x"]),
    "spaces_between_special_tokens": ([True, False], [1, "x"]),
    "truncate_prompt_tokens": ([-1, 1, 512], [0, -2, 513, "x"]),
    "truncation_side": (["left", "right"], ["middle", 5]),
    "priority": ([0], [1, -1, "x"]),
    "cache_salt": (["x", "x" * 128], ["", "x" * 129, 5]),
    "return_token_ids": ([True, False], [1, "x"]),
    "return_tokens_as_token_ids": ([True, False], [1, "x"]),
    "request_id": (["a-b", "x" * 128], ["", "a b", "x" * 129, 5]),
    "logits_processors": ([[]], [["x"], "x"]),
    "add_special_tokens": ([True, False], [1, "x"]),
}
COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (["x", ["x", "y"], [0, LAST_ID], [[0], [5]]], [[], [[]], 5, ["a", 5], [-1], [1.5]]),
    "echo": ([True, False], [1, "x"]),
    "best_of": ([1, 128], [0, 129, "x", 1.5]),
    "suffix": ([""], ["after", 5]),
    "logprobs": ([0, 20], [-2, -1, 21, "x", True]),
    "prompt_embeds": ([""], ["AAAA"]),
}
CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "messages": (
        [
            [{"role": "critic", "content": "x"}],
            [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"}],
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        ],
        [[], 5, ["x"], [{"content": "x"}], [{"role": "user", "content": 7}]],
    ),
    "max_completion_tokens": ([1, 508], [0, -1, 10**6, "x"]),
    "logprobs": ([True, False], [1, "x"]),
    "top_logprobs": ([0, 20], [-2, -1, 21, "x"]),
    "tools": ([[], [TOOL]], [5, ["x"], [{"type": "x"}], [{"type": "function"}]]),
    "documents": ([[{"text": "x"}]], [5, ["x"]]),
    "chat_template_kwargs": ([{}, {"x": 1}], [5, []]),
    "add_generation_prompt": ([True, False], [1, "x"]),
    "continue_final_message": ([False], [1, "x"]),
    "best_of": ([1], [2, "x", True]),
    "echo": ([False], [True, "x"]),
    "suffix": ([""], ["x"]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": ([{}], [{"name": "f"}]),
    "audio": ([{}], [{"voice": "x"}]),
    "modalities": ([["text"]], [["text", "audio"], 5]),
    "web_search_options": ([{}], [{"user_location": {}}]),
}
# These have tests of their own: they need more than one field, or another kind of server.
ELSEWHERE = {
    *("stream_options", "response_format", "structured_outputs", "tool_choice", "chat_template"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "reasoning_effort"),
    *("parallel_tool_calls", "include_reasoning", "thinking_token_budget"),
    "guided_whitespace_pattern",
}


def cases(which: int, *tables: dict[str, tuple[list[Any], list[Any]]]) -> list[tuple[str, Any]]:
    return [
        (field, value)
        for table in tables
        for field, values in table.items()
        for value in values[which]
    ]


def with_what_it_needs(field: str, value: Any) -> dict[str, Any]:
    """The field, and what else makes its value meaningful."""
    fields: dict[str, Any] = {**SAMPLED, field: value}
    if field == "top_logprobs":
        fields["logprobs"] = True
    return fields


def assert_taken(answer: Answer, field: str) -> None:
    assert answer.status == 200, answer.raw
    ignored = answer.headers.get("X-Ignored-Params", "").split(", ")
    is_void = field in {*NO_EFFECT_FIELDS, "length_penalty", "documents"}
    assert (field in ignored) == is_void
    assert answer.raw.startswith((b'{"id":', b'data: {"id":'))


def assert_refused(answer: Answer, field: str) -> None:
    assert answer.status == 400, answer.raw
    param = answer.error["param"]
    assert param == field or param.startswith((f"{field}[", f"{field}."))
    assert field in answer.error["message"]
    assert len(answer.error["message"]) < 300


@in_module
@pytest.mark.parametrize(("field", "value"), cases(0, SHARED, COMPLETIONS), ids=repr)
async def test_completions_take_it(shared: Served, field: str, value: Any) -> None:
    assert_taken(await shared.complete(**with_what_it_needs(field, value)), field)


@in_module
@pytest.mark.parametrize(("field", "value"), cases(0, SHARED, CHAT), ids=repr)
async def test_chat_takes_it(shared: Served, field: str, value: Any) -> None:
    assert_taken(await shared.chat(**with_what_it_needs(field, value)), field)


@in_module
@pytest.mark.parametrize(("field", "value"), cases(1, SHARED, COMPLETIONS), ids=repr)
async def test_completions_refuse_it(shared: Served, field: str, value: Any) -> None:
    assert_refused(await shared.complete(**with_what_it_needs(field, value)), field)


@in_module
@pytest.mark.parametrize(("field", "value"), cases(1, SHARED, CHAT), ids=repr)
async def test_chat_refuses_it(shared: Served, field: str, value: Any) -> None:
    assert_refused(await shared.chat(**with_what_it_needs(field, value)), field)


@pytest.mark.parametrize(
    ("model", "tables"), [(CompletionRequest, (SHARED, COMPLETIONS)), (ChatRequest, (SHARED, CHAT))]
)
def test_every_field_is_in_the_tables(model: Any, tables: Any) -> None:
    named = {field for table in tables for field in table}

    assert set(model.model_fields) - named - ELSEWHERE == set()


async def test_request_value_goes_before_the_models_which_goes_before_the_neutral_one() -> None:
    config = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "repetition_penalty": 1.5}
    async with serving(generation_config=config) as served:
        await served.completed(temperature=None)
        await served.completed(temperature=0.7, top_k=-1, top_p=1, min_p=0.1, repetition_penalty=1)
        default, asked = served.runner.sampling_seen

    assert (default.temperature, default.top_k, default.top_p) == (0.5, 7, 0.25)
    assert (default.min_p, default.repetition_penalty) == (0.0, 1.5)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.7, 0, 1.0)
    assert (asked.min_p, asked.repetition_penalty) == (0.1, 1.0)


@in_module
async def test_tiny_temperatures_are_raised_and_zero_stays(shared: Served) -> None:
    shared.runner.sampling_seen.clear()

    for temperature in (0, 1e-9, 0.009, 0.01):
        await shared.completed(temperature=temperature)

    assert [s.temperature for s in shared.runner.sampling_seen] == [0.0, 0.01, 0.01, 0.01]


@in_module
async def test_max_completion_tokens_goes_before_max_tokens(shared: Served) -> None:
    body = await shared.chatted(max_completion_tokens=3, max_tokens=5)

    assert body["usage"]["completion_tokens"] == 3


@in_module
async def test_error_names_the_field_and_the_key_of_a_bias(shared: Served) -> None:
    error = (await shared.chat(logit_bias={"AI": 1})).error

    assert error["param"] == "logit_bias"
    assert error["message"] == 'logit_bias has the key "AI"; its keys must be token ids'


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "top_logprobs"])
async def test_minus_one_means_the_whole_vocabulary_where_that_is_allowed(field: str) -> None:
    async with serving(max_logprobs=-1) as served:
        if field == "top_logprobs":
            body = await served.chatted(logprobs=True, top_logprobs=-1, max_tokens=1)
            rows = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        elif field == "logprobs":
            body = await served.completed(logprobs=-1, max_tokens=1)
            rows = body["choices"][0]["logprobs"]["top_logprobs"][0]
        else:
            body = await served.completed(prompt_logprobs=-1, max_tokens=1)
            rows = body["choices"][0]["prompt_logprobs"][1]
        refused = await served.complete(logprobs=VOCAB_SIZE + 1)

    assert len(rows) >= 256  # ids of bytes; the scripted rows repeat the rest
    assert_refused(refused, "logprobs")
    assert str(VOCAB_SIZE) in refused.error["message"]


@in_module
async def test_minus_one_is_refused_with_the_limit_where_there_is_one(shared: Served) -> None:
    error = (await shared.complete(logprobs=-1)).error

    assert error["message"] == "logprobs is -1; it must be an integer from 0 to 20"


@in_module
async def test_top_logprobs_need_logprobs(shared: Served) -> None:
    assert_refused(await shared.chat(top_logprobs=1), "top_logprobs")
    assert_refused(await shared.chat(top_logprobs=1, logprobs=False), "top_logprobs")
    assert (await shared.chat(top_logprobs=0)).status == 200


@in_module
async def test_top_logprobs_0_gives_the_token_alone(shared: Served) -> None:
    body = await shared.chatted(logprobs=True, top_logprobs=0, max_tokens=1)

    [row] = body["choices"][0]["logprobs"]["content"]
    assert (row["token"], row["top_logprobs"]) == ("a", [])


@in_module
async def test_what_has_no_effect_is_listed(shared: Served) -> None:
    fields = {"user": "u", "metadata": {}, "foo": 1, "bar\r\nX: y": 2}
    stream = {"stream": True, "stream_options": {"include_usage": True, "new": 1}}

    answer = await shared.chat(**fields, **stream)

    assert answer.headers["X-Ignored-Params"] == "foo, metadata, stream_options.new, user"


@in_module
async def test_keys_of_a_format_that_have_no_effect_are_listed(shared: Served) -> None:
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True, "extra": 1}
    form = {"type": "json_schema", "json_schema": schema, "more": 1, "none": None}

    of_schema = await shared.chat(response_format=form)
    of_text = await shared.complete(response_format={"type": "text", "json_schema": schema})

    assert of_schema.headers["X-Ignored-Params"] == (
        "response_format.json_schema.extra, response_format.more"
    )
    assert of_text.headers["X-Ignored-Params"] == "response_format.json_schema"


@in_module
async def test_fields_that_tokenizing_does_not_know_are_listed(shared: Served) -> None:
    tokens = await shared.post("/tokenize", {"prompt": "a", "foo": 1})
    text = await shared.post("/detokenize", {"tokens": [97], "foo": 1})

    assert tokens.headers["X-Ignored-Params"] == text.headers["X-Ignored-Params"] == "foo"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": "u"}, "user"),
        ({"foo": 1}, "foo"),
        ({"store": False, "metadata": {}}, "metadata"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"stream": True, "stream_options": {"new": 1}}, "stream_options.new"),
        ({"a\r\nb": 1}, "a\r\nb"),
    ],
)
async def test_strict_server_refuses_what_has_no_effect(fields: dict[str, Any], param: str) -> None:
    async with serving(strict_params=True) as served:
        for answer in (await served.complete(**fields), await served.chat(**fields)):
            assert answer.status == 400
            assert answer.error["param"] == param
            assert "--strict-params" in answer.error["message"]


async def test_strict_server_serves_fields_with_effect() -> None:
    async with serving(strict_params=True) as served:
        answer = await served.complete(seed=1, top_p=0.5, user=None, stop=["x"], logprobs=1)

    assert answer.status == 200
    assert "X-Ignored-Params" not in answer.headers
