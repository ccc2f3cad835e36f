"""What the server knows of the texts that its model writes: the parsers, and special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

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
        special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
        # Text and id of each.
        self.special_tokens: Mapping[str, int] = {tokenizer.token_str(i): i for i in special}
        self._ids: dict[type[ReasoningParser] | type[ToolParser], frozenset[int]] = {}
        source = templates.get("tool_use") or templates.get("default") or ""
        if config.reasoning_parser_plugin is not None:
            reasoning_parsers.load_plugin(config.reasoning_parser_plugin)
        if config.tool_parser_plugin is not None:
            _load_tool_plugin(config.tool_parser_plugin)
        self.reasoning = _choose_reasoning(config.reasoning_parser, source)
        self.tools = _choose_tools(config.tool_call_parser, source)
        self._words = _words("\n".join(templates.values()))

    @property
    def forced_tools(self) -> type[ToolParser]:
        """The format of calls that a grammar enforces."""
        return self.tools or tool_parsers.PARSERS[_PLAIN_FORMAT]

    def words_of(self, template: str | None) -> frozenset[str]:
        """Words in the chat templates, or in a request's own; variables that they read are some."""
        return self._words if template is None else _words(template)

    def special_ids_of(self, parser: type[ReasoningParser] | type[ToolParser]) -> frozenset[int]:
        """Special tokens that the parser needs to see in the text."""
        if parser not in self._ids:
            if issubclass(parser, ToolParser):
                self._ids[parser] = self._ids_of_calls(parser)
            else:
                known = self.special_tokens
                self._ids[parser] = frozenset(known[m] for m in parser.markers if m in known)
        return self._ids[parser]

    def _ids_of_calls(self, parser: type[ToolParser]) -> frozenset[int]:
        if not parser.needs_special_tokens:
            return frozenset()
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


def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))


def _choose_reasoning(name: str | None, source: str) -> type[ReasoningParser] | None:
    if name == "auto":
        name = reasoning_parsers.detect_parser(source)
    return None if name is None else reasoning_parsers.get_parser(name)


def _choose_tools(setting: str, source: str) -> type[ToolParser] | None:
    name: str | None = setting
    if name == "auto":
        name = tool_parsers.detect_parser(source)
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
