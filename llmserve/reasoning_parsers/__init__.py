"""Reasoning parsers by name."""

from llmserve.reasoning_parsers.base import ReasoningDelta, ReasoningParser

__all__ = ["ReasoningDelta", "ReasoningParser"]
