"""Responses items: input as chat messages, and chat chunks as output. Checked against the types
of OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from llmserve.api.openai_responses.items import check_input, to_messages
from llmserve.api.openai_responses.output import Output
from llmserve.errors import RequestError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None}


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return chunk(tool_calls=[{"index": index, "id": f"call_{index}", "function": function}])


def written(chunks: list[dict[str, Any]]) -> tuple[Output, list[dict[str, Any]]]:
    """The output after these chunks, and its events, each of a type that the client knows."""
    output = Output()
    events = [event for item in chunks for event in output.add(item)]
    events += output.finish("completed")
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number}, strict=True)
    for item in output.items:
        ITEM.validate_python(item, strict=True)
    return output, events


def messages_of(items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return to_messages(instructions, check_input(items, "input"))


def test_one_turn_of_a_model_is_one_message_again() -> None:
    output, _ = written(
        [chunk(reasoning="hm"), chunk(content="I look."), call(0, "{}", "f"), call(1, "[]", "g")]
    )
    result = {"type": "function_call_output", "call_id": "call_0", "output": "ok"}

    messages = messages_of([{"role": "user", "content": "a"}, *output.items, result], "be brief")

    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "hm",
            "tool_calls": [
                {"id": f"call_{i}", "type": "function", "function": function}
                for i, function in enumerate(
                    [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": "[]"}]
                )
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "ok"},
    ]


def test_text_around_calls_is_one_turn() -> None:
    output, _ = written([chunk(content="a"), call(0, "{}", "f"), chunk(content="b")])

    (message,) = messages_of(output.items)

    assert message["content"] == "ab"
    assert len(message["tool_calls"]) == 1


def test_turns_of_the_assistant_stay_apart() -> None:
    said = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}

    assert messages_of(said) == said
    assert messages_of([said[0], thought, said[1]]) == [
        said[0],
        {"role": "assistant", "content": "b", "reasoning": "hm"},
    ]


def test_parts_of_a_user_stay_parts_and_results_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]

    assert messages_of(
        [
            {"role": "user", "content": parts},
            {"type": "function_call_output", "call_id": "1", "output": parts},
        ]
    ) == [
        {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "tool", "tool_call_id": "1", "content": "ab"},
    ]


def test_encrypted_reasoning_without_text_is_refused() -> None:
    with pytest.raises(RequestError, match=r"input\[0\]\.encrypted_content"):
        messages_of([{"type": "reasoning", "summary": [], "encrypted_content": "x"}])


def test_items_follow_each_other_and_each_is_closed_before_the_next_begins() -> None:
    output, events = written(
        [
            chunk(reasoning="h"),
            chunk(reasoning="m"),
            chunk(content="yes"),
            call(0, "", "f"),
            call(0, '{"x":'),
            call(0, "1}"),
            call(1, "{}", "g"),
            chunk(content="done"),
            chunk("stop"),
        ]
    )

    assert [item["type"] for item in output.items] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert output.items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [i["arguments"] for i in output.items if i["type"] == "function_call"] == [
        '{"x":1}',
        "{}",
    ]
    order = [
        (event["type"].rpartition(".")[2], event["output_index"])
        for event in events
        if event["type"].startswith("response.output_item")
    ]
    assert order == [(kind, index) for index in range(5) for kind in ("added", "done")]


PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: chunk(reasoning=text), st.text(min_size=1)),
        st.builds(lambda text: chunk(content=text), st.text(min_size=1)),
    )
)


@given(PIECES)
def test_deltas_joined_are_the_items_of_the_end(chunks: list[dict[str, Any]]) -> None:
    output, events = written(chunks)

    joined: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    for item in output.items:
        assert joined.get(item["id"], "") == item["content"][0]["text"]
    sent = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(joined.values()) == "".join("".join(d.values()) for d in sent)
    assert json.loads(json.dumps(output.items)) == output.items
