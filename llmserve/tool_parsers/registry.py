"""Tool parsers by name, those of plugins included."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from llmserve.tool_parsers.base import ToolParser
from llmserve.tool_parsers.deepseek_v3 import DeepSeekV3Parser
from llmserve.tool_parsers.glm45 import Glm45Parser
from llmserve.tool_parsers.granite import GraniteParser
from llmserve.tool_parsers.hermes import HermesParser
from llmserve.tool_parsers.json_list import JsonListParser
from llmserve.tool_parsers.kimi_k2 import KimiK2Parser
from llmserve.tool_parsers.llama3_json import Llama3JsonParser
from llmserve.tool_parsers.llama4_pythonic import Llama4PythonicParser
from llmserve.tool_parsers.mistral import MistralParser
from llmserve.tool_parsers.openai_harmony import OpenAIHarmonyParser
from llmserve.tool_parsers.phi4_mini_json import Phi4MiniJsonParser
from llmserve.tool_parsers.pythonic import PythonicParser
from llmserve.tool_parsers.qwen3_coder import Qwen3CoderParser

PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV3Parser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "json": JsonListParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": Llama4PythonicParser,
    "mistral": MistralParser,
    "openai": OpenAIHarmonyParser,
    "phi4_mini_json": Phi4MiniJsonParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_json": HermesParser,
    "qwen3_xml": Qwen3CoderParser,
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
