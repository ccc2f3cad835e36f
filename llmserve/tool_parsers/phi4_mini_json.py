"""`functools[{"name": ..., "arguments": {...}}]` (Phi-4-mini)."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.json_calls import JsonCallParser
from llmserve.tool_parsers.lark_text import LarkBuilder, call_list_rule
from llmserve.tool_parsers.source import Steps

_OPEN = "functools["


class Phi4MiniJsonParser(JsonCallParser):
    markers = (_OPEN,)

    def read_calls(self, marker: str) -> Steps[None]:
        yield from self.read_call_list()
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
        rest = call_list_rule(
            builder,
            tools,
            key="arguments",
            is_required=is_required,
            is_parallel=is_parallel,
            opening="",
        )
        return builder.answer(_OPEN, rest, without=cls.markers, is_required=is_required)
