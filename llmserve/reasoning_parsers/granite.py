"""Granite 3.2: two sentences in plain text set thoughts and response apart."""

from __future__ import annotations

from llmserve.reasoning_parsers.tagged import TaggedParser


class GraniteParser(TaggedParser):
    """The model writes "Here is" or "Here's"."""

    start_markers = ("Here is my thought process:", "Here's my thought process:")
    end_markers = ("Here is my response:", "Here's my response:")
