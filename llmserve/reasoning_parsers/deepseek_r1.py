"""DeepSeek R1 and its distillations: the output is within `<think>` from its first token."""

from __future__ import annotations

from llmserve.reasoning_parsers.tagged import TaggedParser


class DeepSeekR1Parser(TaggedParser):
    """All before `</think>` is reasoning, with `<think>` or without."""

    start_markers = ("<think>",)
    end_markers = ("</think>",)
    is_always_open = True
