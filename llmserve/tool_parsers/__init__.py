"""Tool parsers by name."""

from llmserve.tool_parsers.base import CallDelta, ParsedDelta, Tool, ToolParser

__all__ = ["CallDelta", "ParsedDelta", "Tool", "ToolParser"]
