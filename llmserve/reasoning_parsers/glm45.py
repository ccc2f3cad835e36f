"""GLM 4.5: `<think>...</think>`, which a tool call may cut short."""

from __future__ import annotations

from llmserve.reasoning_parsers.tagged import TaggedParser


class Glm45Parser(TaggedParser):
    """The template closes the thinking with an empty pair, or leaves it to the model."""

    start_markers = ("<think>",)
    end_markers = ("</think>",)
    call_markers = ("<tool_call>",)
