"""Tool parsers by name."""

from llmserve.tool_parsers.base import CallDelta, ParsedDelta, Tool, ToolParser
from llmserve.tool_parsers.detect import detect_parser
from llmserve.tool_parsers.registry import PARSERS, load_plugin, register

__all__ = [
    "PARSERS",
    "CallDelta",
    "ParsedDelta",
    "Tool",
    "ToolParser",
    "detect_parser",
    "load_plugin",
    "register",
]
