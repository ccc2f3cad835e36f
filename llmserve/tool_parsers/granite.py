"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`, or `<tool_call>` or nothing before the list
(Granite 3)."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.json_calls import JsonCallParser
from llmserve.tool_parsers.lark_text import LarkBuilder, call_list_rule
from llmserve.tool_parsers.source import Steps

_TOKEN = "<|tool_call|>"
_TAG = "<tool_call>"


class GraniteParser(JsonCallParser):
    markers = (_TOKEN, _TAG)
    bare_markers = ("[",)
    needs_special_tokens = True

    def read_calls(self, marker: str) -> Steps[None]:
        if marker != "[":
            yield from self.source.skip_space()
            yield from self.source.expect("[")
        yield from self.read_call_list(is_bare=marker == "[")
        self.commit()

    @classmethod
    def lark(
        cls,
        tools: list[Tool],
        *,
        is_required: bool,
        is_parallel: bool,
        special_tokens: Mapping[str, int],
    ) -> str:
        builder = LarkBuilder(special_tokens)
        calls = call_list_rule(
            builder, tools, key="arguments", is_required=is_required, is_parallel=is_parallel
        )
        return builder.answer(
            _TOKEN, calls, without=cls.markers, is_required=is_required, not_at_start="["
        )
