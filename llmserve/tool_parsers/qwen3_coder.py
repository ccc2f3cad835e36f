"""Calls with a tag for each parameter (Qwen3-Coder, Qwen 3.5).

<tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call>

The tags of `tool_call` may be missing. A value ends at the first `</parameter>`.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.argument_writer import ArgumentWriter
from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder, quoted
from llmserve.tool_parsers.parameter_lark import ParameterTags, parameters_rule
from llmserve.tool_parsers.scanning import ScanningParser
from llmserve.tool_parsers.source import Malformed, Steps

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_TAGS = ParameterTags(
    open=_PARAMETER, before_value=">\n", after_value="\n", close=_PARAMETER_END, separator="\n"
)


class Qwen3CoderParser(ScanningParser):
    markers = (_OPEN, _FUNCTION)
    needs_special_tokens = True  # in some vocabularies

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        if marker == _OPEN:
            yield from source.skip_space()
            yield from source.expect(_FUNCTION)
        yield from self._read_function()
        end = source.pos
        yield from source.skip_space()
        if not (yield from source.accept(_CLOSE)):
            is_cut = source.is_ended and _CLOSE.startswith(source.text[source.pos :])
            source.pos = len(source.text) if is_cut else end
        self.commit()

    def _read_function(self) -> Steps[None]:
        source = self.source
        name = yield from self._read_name()
        self.begin_call(name)
        arguments = ArgumentWriter(self.add_arguments, self.tool(name))
        while True:
            yield from source.skip_space()
            if (yield from source.expect(_PARAMETER, _FUNCTION_END)) == _FUNCTION_END:
                break
            key = yield from self._read_name()
            yield from arguments.read_value(source, key, _PARAMETER_END, is_framed=True)
        arguments.end()

    def _read_name(self) -> Steps[str]:
        start = self.source.pos
        name = yield from self.source.until(">", "\n", "<")
        if not (yield from self.source.accept(">")) or not name.strip():
            self.source.pos = start
            raise Malformed
        return name.strip()

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
        functions = builder.either(
            [
                quoted(f"\n{_FUNCTION}{tool.name}>\n")
                + f" {parameters_rule(builder, tool, _TAGS, is_required=is_required)} "
                + quoted(f"{_FUNCTION_END}\n")
                for tool in tools
            ]
        )
        body = f"{functions} {builder.literal(_CLOSE)}"
        return builder.answer(
            _OPEN,
            body,
            without=cls.markers,
            is_required=is_required,
            is_parallel=is_parallel,
            separator=quoted("\n"),
        )
