"""Chat templates in the styles of well-known model families render as transformers renders them.

The templates in templates/ are written for these tests: the turns, tools and thoughts of each
family, and the Jinja that its own template is made of.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from llmserve.errors import RequestError
from llmserve.tokenizer import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SOURCES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
# These join a call's arguments to text; the others write them as JSON themselves.
WITH_TEXT_ARGUMENTS = {"deepseek_v3"}
# These have turns for any role; in the others a developer message goes into the system's place.
WITH_DEVELOPER_TURNS = {"llama3", "phi4_mini", "granite", "gpt_oss", "trained"}
# It takes lists of parts; the others get their texts joined.
WITH_PARTS = {"gemma3"}

SYSTEM = {"role": "system", "content": "Be <brief> & “kind”."}
USER = {"role": "user", "content": "  What's in Zürich? 🚀\n\n"}
REPLY = {"role": "assistant", "content": "A lake,\nand more.  "}
THOUGHT = {"role": "assistant", "content": "42.", "reasoning_content": "\nSix times seven.\n"}
TAGGED = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}


def calls(*arguments: Any, content: str | None = None, **keys: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call{index:05}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps(value)},
            }
            for index, value in enumerate(arguments)
        ],
        **keys,
    }


def result(index: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{index:05}", "name": "f", "content": text}


PLACE = {"city": "Zürich", "days": [1, 2.5, None, True], "where": {"a": "<b>"}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system and three turns": [SYSTEM, USER, REPLY, USER],
    "ends with a reply": [SYSTEM, USER, REPLY],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b"}]}
    ],
    "a call and its result": [SYSTEM, USER, calls(PLACE), result(0, '{"t": "5 °C"}'), REPLY],
    "two calls at once": [USER, calls(PLACE, {}), result(0, "rain"), result(1, "sun")],
    "a call with text": [USER, calls(PLACE, content="I look."), result(0, "rain"), REPLY, USER],
    "a call with a thought": [USER, calls({}, reasoning_content="Look."), result(0, "x"), USER],
    "thoughts": [USER, THOUGHT, USER, THOUGHT],
    "thoughts in tags": [USER, TAGGED, USER, TAGGED],
    "developer": [{"role": "developer", "content": "DEV"}, USER, REPLY, USER],
    "two users in a row": [USER, USER, REPLY],
    "reply first": [REPLY, USER],
    "a role of its own": [USER, {"role": "critic", "content": "No."}, REPLY],
    "empty texts": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER],
    "result without call": [USER, result(0, "x")],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says how it <is> & “was”",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": " Name "},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "any": {"type": ["string", "number"]},
                    "map": {"type": "object", "properties": {"x": {"type": "boolean"}}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"properties": {}}},
    },
]
DOCUMENTS = [
    {"doc_id": 7, "title": "lakes of the alps", "text": "Deep & cold.\nVery deep indeed."},
    {"doc_id": "b", "title": "a hill", "text": "Low."},
]
EXTRAS: dict[str, dict[str, Any]] = {
    "nothing more": {},
    "tools": {"tools": TOOLS},
    "documents": {"documents": DOCUMENTS},
    "variables": {
        "enable_thinking": False,
        "thinking": True,
        "controls": {"citations": True},
        "reasoning_effort": "high",
        "date_string": "1 Jan 2030",
        "tools_in_user_message": False,
        "tools": TOOLS,
        "documents": DOCUMENTS,
    },
}


@cache
def tokenizer(source: str) -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel({"?": 0, "<s>": 1, "</s>": 2}, unk_token="?"))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    made.chat_template = source
    return made


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(SOURCES[name], TOKENS)


def theirs(name: str, messages: list[dict[str, Any]], **kwargs: Any) -> str | None:
    """What transformers makes of the messages; None if the template refuses them."""
    try:
        text = tokenizer(SOURCES[name]).apply_chat_template(
            [as_template_wants(name, message) for message in messages], tokenize=False, **kwargs
        )
    except Exception:  # a template can raise whatever an operation in it raises
        return None
    assert isinstance(text, str)
    return text


def ours(name: str, messages: list[dict[str, Any]], **kwargs: Any) -> str | None:
    try:
        return template(name).render(messages, **kwargs)
    except RequestError:
        return None


def as_template_wants(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message as a caller of transformers, who knows the template, writes it."""
    known = {**message, "content": message["content"] or ""}
    if isinstance(known["content"], list) and name not in WITH_PARTS:
        known["content"] = "\n".join(part["text"] for part in known["content"])
    if known["role"] == "developer" and name not in WITH_DEVELOPER_TURNS:
        known["role"] = "system"
    if "tool_calls" in known and name not in WITH_TEXT_ARGUMENTS:
        known["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(text)}}
            for call in known["tool_calls"]
            for text in [call["function"]["arguments"]]
        ]
    return known


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_equals_that_of_transformers(
    name: str, conversation: str, extra: str, add_generation_prompt: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    options = {"add_generation_prompt": add_generation_prompt, **EXTRAS[extra]}

    assert ours(name, messages, **options) == theirs(name, messages, **options)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_continued_text_equals_that_of_transformers(name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    options = {"add_generation_prompt": False, "continue_final_message": True}

    assert ours(name, messages, **options) == theirs(name, messages, **options)


@pytest.mark.parametrize("name", SOURCES)
def test_most_conversations_are_rendered(name: str) -> None:
    """Two refusals are equal as well, so that the tests above need some that render."""
    texts = [ours(name, messages) for messages in CONVERSATIONS.values()]

    assert sum(text is not None for text in texts) >= 8
    assert all(text is None or len(text) > 10 for text in texts)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_of_a_developer_message_is_lost(name: str) -> None:
    assert "DEV" in (ours(name, CONVERSATIONS["developer"]) or "")
