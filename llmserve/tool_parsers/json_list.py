"""`[{"name": ..., "parameters": {...}}]` and nothing around it: for models without a format of
their own, whose calls a grammar enforces."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.json_calls import JsonCallParser
from llmserve.tool_parsers.lark_text import LarkBuilder, call_list_rule
from llmserve.tool_parsers.source import Steps


class JsonListParser(JsonCallParser):
    bare_markers = ("[",)

    def read_calls(self, marker: str) -> Steps[None]:
        yield from self.read_call_list(is_bare=True)
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
            builder, tools, key="parameters", is_required=is_required, is_parallel=is_parallel
        )
        if is_required:
            return builder.build(calls)
        return builder.build(f"{calls} | {builder.text(without=(), not_at_start='[')}")
