"""Texts with tool calls in every format, written here from the formats' descriptions.

Each format has a writer of calls; the texts around them are the same for all formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmserve.tool_parsers import PARSERS, Tool

Call = tuple[str, dict[str, Any]]

TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "flags": {"type": "array", "items": {"type": "boolean"}},
                "options": {"type": "object"},
                "ratio": {"type": "number"},
                "is_exact": {"type": "boolean"},
                "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Tool("list_cities", {"type": "object", "properties": {}}),
]


@dataclass(frozen=True)
class Format:
    """`bare`: the calls have no marker, so they count only where a text begins."""

    write: Callable[[list[Call]], str]
    bare: bool = False
    # Tokens of its texts, for vocabularies that have them.
    tokens: tuple[str, ...] = ()
    max_calls: int = 3
    # A string as an argument cannot have these.
    forbidden: tuple[str, ...] = ()
    # What must not come between a text and calls.
    markers: tuple[str, ...] = field(default=())


def _object(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _list(calls: list[Call], key: str = "arguments") -> str:
    return "[" + ", ".join(_object(call, key) for call in calls) + "]"


def _hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _llama(calls: list[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _mistral_named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(args)}" for name, args in calls)


def _pythonic(calls: list[Call]) -> str:
    spelled = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"
        for name, args in calls
    ]
    return f"[{', '.join(spelled)}]"


def _qwen(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in call[1].items()
        )
        return f"<tool_call>\n<function={call[0]}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(one(call) for call in calls)


def _glm(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for key, value in call[1].items()
        )
        return f"<tool_call>{call[0]}\n{pairs}</tool_call>"

    return "\n".join(one(call) for call in calls)


def _deepseek(calls: list[Call]) -> str:
    spelled = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{spelled}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: list[Call]) -> str:
    spelled = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(args)}<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{spelled}<｜tool▁calls▁end｜>"


def _kimi(calls: list[Call]) -> str:
    spelled = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(args)}"
        "<|tool_call_end|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{spelled}<|tool_calls_section_end|>"


def _harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(args)}"
        "<|call|>"
        for name, args in calls
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


_DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_TOOL_CALL = ("<tool_call>", "</tool_call>")

# By a name for the test, which begins with the parser's name.
FORMATS: dict[str, Format] = {
    "hermes": Format(_hermes, tokens=_TOOL_CALL),
    "llama3_json": Format(_llama, bare=True, tokens=("<|python_tag|>",)),
    "llama3_json tagged": Format(
        lambda calls: f"<|python_tag|>{_llama(calls)}", tokens=("<|python_tag|>",)
    ),
    "mistral": Format(lambda calls: f"[TOOL_CALLS]{_list(calls)}", tokens=("[TOOL_CALLS]",)),
    "mistral named": Format(_mistral_named, tokens=("[TOOL_CALLS]", "[ARGS]")),
    "json": Format(lambda calls: _list(calls, "parameters"), bare=True),
    "pythonic": Format(_pythonic, bare=True),
    "llama4_pythonic": Format(
        lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>",
        tokens=("<|python_start|>", "<|python_end|>"),
    ),
    "qwen3_coder": Format(_qwen, tokens=_TOOL_CALL, forbidden=("</parameter>",)),
    "glm45": Format(
        _glm,
        tokens=(*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        forbidden=("</arg_value>",),
    ),
    "deepseek_v3": Format(_deepseek, tokens=_DEEPSEEK_TOKENS),
    "deepseek_v3 plain": Format(_deepseek_v31, tokens=_DEEPSEEK_TOKENS),
    "kimi_k2": Format(
        _kimi,
        tokens=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
    ),
    "granite": Format(lambda calls: f"<|tool_call|>{_list(calls)}", tokens=("<|tool_call|>",)),
    "granite tag": Format(lambda calls: f"<tool_call>{_list(calls)}"),
    "granite bare": Format(_list, bare=True),
    "phi4_mini_json": Format(lambda calls: f"functools{_list(calls)}"),
    "openai": Format(
        _harmony,
        tokens=(
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|call|>",
            "<|end|>",
            "<|return|>",
        ),
    ),
}

NAMES = list(FORMATS)

CALLS: dict[str, list[Call]] = {
    "one": [("get_weather", {"city": "Paris", "days": 3})],
    "nested": [
        ("get_weather", {"options": {"a": {"b": [1, [2, {"c": None}]], "d": []}}, "flags": [True]})
    ],
    "unicode": [("get_weather", {"city": "Zürich 東京 🙂 \u202e é"})],
    "escapes": [("get_weather", {"city": "a \"quote\", a \\ and\ttwo\nlines, 'single'"})],
    "tags": [
        ("get_weather", {"city": "} ] ) </tool <tool_cal [f(a=1)] ``` ; <parameter={} [ARGS"})
    ],
    "spaces": [("get_weather", {"city": "  a\n\n b ", "unit": "null and void"})],
    "types": [
        (
            "get_weather",
            {"ratio": -1.5e3, "is_exact": False, "unit": None, "flags": [True, False], "days": 0},
        )
    ],
    "no arguments": [("list_cities", {})],
    "unknown name": [("no_such_tool", {"a": 1, "b": [True, None], "c": "x"})],
    "parallel": [
        ("get_weather", {"city": "Paris"}),
        ("list_cities", {}),
        ("get_weather", {"city": "Rome", "options": {"k": "}"}}),
    ],
}


def parser_name(name: str) -> str:
    return name.partition(" ")[0]


def parse(
    name: str, pieces: list[str], *, is_constrained: bool = False, tools: list[Tool] | None = None
) -> tuple[str, list[tuple[str, str]], int]:
    """Content, names and arguments of the calls, and the number of deltas with arguments."""
    parser = PARSERS[parser_name(name)](
        TOOLS if tools is None else tools, is_constrained=is_constrained
    )
    content = ""
    calls: list[list[str]] = []
    num_deltas = 0
    for delta in [*map(parser.feed, pieces), parser.flush()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.id
                assert call.index == len(calls)
                calls.append([call.name, ""])
            else:
                assert call.id is None
            assert call.index == len(calls) - 1
            calls[call.index][1] += call.arguments
            num_deltas += bool(call.arguments)
    return content, [(call[0], call[1]) for call in calls], num_deltas
