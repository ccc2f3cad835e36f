"""What the server knows of the texts that its model writes: the parsers, and special tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from llmserve import reasoning_parsers, tool_parsers
from llmserve.config import FrontendConfig
from llmserve.errors import StartupError
from llmserve.reasoning_parsers import ReasoningParser
from llmserve.tokenizer import Tokenizer
from llmserve.tool_parsers import Tool, ToolParser

# Forced calls of a model whose own format is not known.
_PLAIN_FORMAT = "json"
# How a grammar of calls names a special token.
_TOKEN_IN_LARK = re.compile(r"<\[(\d+)\]>")
_ANY_TOOL = Tool("f", {"type": "object"})


class OutputFormats:
    """Chosen once, from the settings and the chat template."""

    def __init__(
        self, config: FrontendConfig, tokenizer: Tokenizer, templates: Mapping[str, str]
    ) -> None:
        """Runs the plugins. Raises StartupError for what is not a parser or a plugin."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._special_tokens: Mapping[str, int] | None = None
        source = templates.get("tool_use") or templates.get("default") or ""
        if config.reasoning_parser_plugin is not None:
            reasoning_parsers.load_plugin(config.reasoning_parser_plugin)
        if config.tool_parser_plugin is not None:
            _load_tool_plugin(config.tool_parser_plugin)
        self.reasoning = _choose_reasoning(config.reasoning_parser, source)
        self.tools = _choose_tools(config.tool_call_parser, source)
        self.uses_effort = "reasoning_effort" in source

    @property
    def forced_tools(self) -> type[ToolParser]:
        """The format of calls that a grammar enforces."""
        return self.tools or tool_parsers.PARSERS[_PLAIN_FORMAT]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Text and id of each. The first use takes 0.1 s where there are 262144 tokens."""
        with self._lock:
            if self._special_tokens is None:
                tokenizer = self._tokenizer
                ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
                found = {tokenizer.token_str(i): i for i in ids}
                self._special_tokens = MappingProxyType(found)
            return self._special_tokens

    def special_ids_of(self, parser: type[ReasoningParser] | type[ToolParser]) -> frozenset[int]:
        """Special tokens that the parser needs to see in the text."""
        if issubclass(parser, ToolParser):
            return self._ids_of_calls(parser) if parser.needs_special_tokens else frozenset()
        return frozenset(i for marker in parser.markers if (i := self._special_id(marker)) >= 0)

    def _ids_of_calls(self, parser: type[ToolParser]) -> frozenset[int]:
        grammars = [
            parser.lark(
                [_ANY_TOOL],
                is_required=is_required,
                is_parallel=True,
                special_tokens=self.special_tokens,
            )
            for is_required in (False, True)
        ]
        return frozenset(int(i) for text in grammars for i in _TOKEN_IN_LARK.findall(text))

    def _special_id(self, text: str) -> int:
        """The special token of this text, -1 if there is none."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and self._tokenizer.is_special(ids[0]) else -1


def _choose_reasoning(name: str | None, source: str) -> type[ReasoningParser] | None:
    if name == "auto":
        name = reasoning_parsers.detect_parser(source)
    return None if name is None else reasoning_parsers.get_parser(name)


def _choose_tools(setting: str, source: str) -> type[ToolParser] | None:
    name: str | None = setting
    if name == "auto":
        name = "hermes" if "<tool_call>" in source else None
    if name is None:
        return None
    if name not in tool_parsers.PARSERS:
        names = ", ".join(sorted(tool_parsers.PARSERS))
        raise StartupError(f"--tool-call-parser is {name!r}; it must be auto or one of {names}")
    return tool_parsers.PARSERS[name]


def _load_tool_plugin(path: str) -> None:
    try:
        tool_parsers.load_plugin(Path(path))
    except Exception as error:  # whatever the plugin raises
        raise StartupError(
            f"--tool-parser-plugin {path} failed: {type(error).__name__}: {error}"
        ) from error
