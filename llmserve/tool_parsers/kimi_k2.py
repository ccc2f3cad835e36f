"""A section of calls between special tokens, each with an id of the model's (Kimi K2).

<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder, arguments_schema, json_rule, repeated
from llmserve.tool_parsers.sections import SectionParser
from llmserve.tool_parsers.source import Malformed, Steps

_SECTION = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_PREFIX = "functions."


class KimiK2Parser(SectionParser):
    section_end = _SECTION_END
    call_begin = _CALL
    markers = (_SECTION, _CALL)

    def read_call(self) -> Steps[None]:
        source = self.source
        start = source.pos
        call_id = (yield from source.until(_ARGUMENTS, _CALL_END)).strip()
        name, colon, number = call_id.removeprefix(_PREFIX).rpartition(":")
        if not colon or not number.isdecimal():
            source.pos = start
            raise Malformed
        yield from source.expect(_ARGUMENTS)
        self.begin_call(name, call_id)
        yield from self.read_object()
        yield from source.skip_space()
        yield from source.expect(_CALL_END)

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
        bodies = [
            f"{builder.literal(f'{_CALL}{_PREFIX}{tool.name}:')} /[0-9]{{1,4}}/ "
            f"{builder.literal(_ARGUMENTS)} "
            f"{json_rule(arguments_schema(tool, is_required=is_required))} "
            f"{builder.literal(_CALL_END)}"
            for tool in tools
        ]
        call = builder.either(bodies)
        calls = repeated(call, separator="", is_parallel=is_parallel)
        body = f"{calls} {builder.literal(_SECTION_END)}"
        return builder.answer(_SECTION, body, without=cls.markers, is_required=is_required)
