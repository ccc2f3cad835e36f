"""Reasoning parsers by name: the built-in ones, and those of plugins."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from llmserve.errors import StartupError
from llmserve.reasoning_parsers.base import ReasoningParser
from llmserve.reasoning_parsers.deepseek_r1 import DeepSeekR1Parser
from llmserve.reasoning_parsers.glm45 import Glm45Parser
from llmserve.reasoning_parsers.granite import GraniteParser
from llmserve.reasoning_parsers.kimi_k2 import KimiK2Parser
from llmserve.reasoning_parsers.mistral import MistralParser
from llmserve.reasoning_parsers.openai_gptoss import GptOssParser
from llmserve.reasoning_parsers.qwen3 import Qwen3Parser

PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "glm45": Glm45Parser,
    "granite": GraniteParser,
    "kimi_k2": KimiK2Parser,
    "mistral": MistralParser,
    "openai_gptoss": GptOssParser,
    "qwen3": Qwen3Parser,
}

# Marks of a chat template, the most telling ones first.
_TEMPLATE_MARKS = (
    ("<|channel|>", "openai_gptoss"),
    ("[THINK]", "mistral"),
    ("Here is my thought process:", "granite"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<\uff5cAssistant\uff5c>", "deepseek_r1"),
    ("</think>", "qwen3"),
)


def register(name: str) -> Callable[[type[ReasoningParser]], type[ReasoningParser]]:
    """A class decorator for plugins: the parser becomes a value of --reasoning-parser."""

    def add(parser: type[ReasoningParser]) -> type[ReasoningParser]:
        PARSERS[name] = parser
        return parser

    return add


def load_plugin(path: str) -> None:
    """Runs a Python file that registers parsers. Raises StartupError."""
    spec = importlib.util.spec_from_file_location(f"llmserve_plugin_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise StartupError(f"--reasoning-parser-plugin {path} is not a Python file")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # whatever the plugin raises
        raise StartupError(
            f"--reasoning-parser-plugin {path} failed: {type(error).__name__}: {error}"
        ) from error


def get_parser(name: str) -> type[ReasoningParser]:
    """Raises StartupError for a name that no parser has."""
    if name not in PARSERS:
        names = ", ".join(sorted(PARSERS))
        raise StartupError(f"--reasoning-parser is {name!r}; it must be auto or one of {names}")
    return PARSERS[name]


def detect_parser(chat_template_source: str) -> str | None:
    """The parser for what a template shows of the model's thinking; None where it shows none."""
    for mark, name in _TEMPLATE_MARKS:
        if mark in chat_template_source:
            return name if name != "deepseek_r1" or "</think>" in chat_template_source else None
    return None
