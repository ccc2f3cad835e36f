"""Tool parsers by name."""

from llmserve.tool_parsers.base import CallDelta, ParsedDelta, Tool, ToolParser
from llmserve.tool_parsers.registry import PARSERS, load_plugin, register

__all__ = [
    "PARSERS",
    "CallDelta",
    "ParsedDelta",
    "Tool",
    "ToolParser",
    "load_plugin",
    "register",
]
