"""Tool parsers by name, those of plugins included."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from llmserve.tool_parsers.base import ToolParser
from llmserve.tool_parsers.hermes import HermesParser
from llmserve.tool_parsers.json_list import JsonListParser
from llmserve.tool_parsers.llama3_json import Llama3JsonParser
from llmserve.tool_parsers.mistral import MistralParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_json": HermesParser,
    "json": JsonListParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "mistral": MistralParser,
}


def register(name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
    """Makes a parser class known by a name, which may replace an existing one."""

    def add(parser: type[ToolParser]) -> type[ToolParser]:
        PARSERS[name] = parser
        return parser

    return add


def load_plugin(path: Path) -> None:
    """Runs a Python file that registers parsers. Raises ValueError if there is no such file;
    whatever the file raises goes through."""
    spec = importlib.util.spec_from_file_location(f"llmserve_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{path} is not a Python file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
