"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated (Hermes 2 Pro, Qwen 2.5, 3).

The last closing tag may be missing, and so may one that the next opening tag follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.json_calls import JsonCallParser
from llmserve.tool_parsers.lark_text import LarkBuilder, call_rule, quoted
from llmserve.tool_parsers.source import Malformed, Steps

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser(JsonCallParser):
    markers = (_OPEN,)
    needs_special_tokens = True  # in some vocabularies

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        yield from self.read_call_object()
        end = source.pos
        yield from source.skip_space()
        closing = yield from source.accept(_CLOSE)
        if not closing and not (yield from source.at(_OPEN)):
            if not (source.is_ended and _CLOSE.startswith(source.text[source.pos :])):
                raise Malformed
            source.pos = len(source.text)
        elif not closing:
            source.pos = end
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
        call = call_rule(
            builder,
            tools,
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            is_required=is_required,
        )
        body = f'"\\n"? {call} "\\n"? {builder.literal(_CLOSE)}'
        return builder.answer(
            _OPEN,
            body,
            without=cls.markers,
            is_required=is_required,
            is_parallel=is_parallel,
            separator=quoted("\n"),
        )
