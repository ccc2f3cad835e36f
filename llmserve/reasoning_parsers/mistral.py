"""Magistral: `[THINK]...[/THINK]`, special tokens of its vocabulary."""

from __future__ import annotations

from llmserve.reasoning_parsers.tagged import TaggedParser


class MistralParser(TaggedParser):
    """The system prompt asks for thinking; the model begins it."""

    start_markers = ("[THINK]",)
    end_markers = ("[/THINK]",)
