"""Qwen3 and QwQ: `<think>...</think>`, opened by the template, by the model, or not at all."""

from __future__ import annotations

from llmserve.reasoning_parsers.tagged import TaggedParser


class Qwen3Parser(TaggedParser):
    """A tool call ends the thinking too."""

    start_markers = ("<think>",)
    end_markers = ("</think>",)
    call_markers = ("<tool_call>",)
