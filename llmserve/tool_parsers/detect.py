"""Chooses a parser by the marks that formats leave in the source of a chat template."""

# The bars in DeepSeek's tokens are not ASCII.
# ruff: noqa: RUF001

from __future__ import annotations

# The first parser all of whose marks are there; what others contain as well comes later.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("openai", ("<|channel|>", "to=functions.")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|/tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("llama4_pythonic", ("<|header_start|>", "func_name1(")),
    ("llama4_json", ("<|header_start|>", '"parameters":')),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"name": function name, "parameters":',)),
    ("hermes", ("<tool_call>",)),
)


def detect_parser(chat_template_source: str) -> str | None:
    """The name of the parser for what the template asks the model to write, None if unknown."""
    for name, marks in _MARKS:
        if all(mark in chat_template_source for mark in marks):
            return name
    return None
