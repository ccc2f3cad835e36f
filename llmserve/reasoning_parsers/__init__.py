"""Reasoning parsers by name."""

from llmserve.reasoning_parsers.base import ReasoningDelta, ReasoningParser, Thinking
from llmserve.reasoning_parsers.registry import (
    PARSERS,
    detect_parser,
    get_parser,
    load_plugin,
    register,
)

__all__ = [
    "PARSERS",
    "ReasoningDelta",
    "ReasoningParser",
    "Thinking",
    "detect_parser",
    "get_parser",
    "load_plugin",
    "register",
]
