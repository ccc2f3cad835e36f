"""Kimi K2 Thinking: `<think>...</think>`, which a section of tool calls may cut short."""

from __future__ import annotations

from llmserve.reasoning_parsers.tagged import TaggedParser


class KimiK2Parser(TaggedParser):
    """Tool calls may begin within the thinking."""

    start_markers = ("<think>",)
    end_markers = ("</think>",)
    call_markers = ("<|tool_calls_section_begin|>",)
