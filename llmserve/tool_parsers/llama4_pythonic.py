"""`<|python_start|>[f(a=1), g(b="x")]<|python_end|>`, or the list alone (Llama 4)."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder
from llmserve.tool_parsers.python_lark import call_list
from llmserve.tool_parsers.pythonic import PythonicParser
from llmserve.tool_parsers.source import Steps

_START = "<|python_start|>"
_END = "<|python_end|>"


class Llama4PythonicParser(PythonicParser):
    markers = (_START,)
    needs_special_tokens = True

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        if marker == _START:
            yield from source.skip_space()
            yield from source.expect("[")
        yield from self.read_list()
        end = source.pos
        yield from source.skip_space()
        if not (yield from source.accept(_END)):
            is_cut = source.is_ended and _END.startswith(source.text[source.pos :])
            source.pos = len(source.text) if is_cut else end
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
        calls = call_list(builder, tools, is_required=is_required, is_parallel=is_parallel)
        body = f"{calls} {builder.literal(_END)}"
        return builder.answer(
            _START, body, without=cls.markers, is_required=is_required, not_at_start="["
        )
