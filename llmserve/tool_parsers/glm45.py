"""`<tool_call>NAME` with pairs of `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>`, then
`</tool_call>` (GLM 4.5 to 4.7). White space between the tags is allowed."""

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
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
_TAGS = ParameterTags(
    open=_KEY,
    before_value=f"{_KEY_END}\n{_VALUE}",
    after_value="",
    close=_VALUE_END,
    separator="\n",
    are_newlines_optional=True,
)


class Glm45Parser(ScanningParser):
    markers = (_OPEN,)
    needs_special_tokens = True

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        name = yield from self._read_name()
        self.begin_call(name)
        arguments = ArgumentWriter(self.add_arguments, self.tool(name))
        while True:
            yield from source.skip_space()
            if (yield from source.expect(_KEY, _CLOSE)) == _CLOSE:
                break
            key = yield from source.until(_KEY_END)
            yield from source.expect(_KEY_END)
            yield from source.skip_space()
            yield from source.expect(_VALUE)
            yield from arguments.read_value(source, key.strip(), _VALUE_END, is_framed=False)
        arguments.end()
        self.commit()

    def _read_name(self) -> Steps[str]:
        """The first line, which a tag may end."""
        source = self.source
        yield from source.skip_space()
        start = source.pos
        name = (yield from source.until("<", "\n")).rstrip()
        if not name or any(char in name for char in ' {}"'):
            source.pos = start
            raise Malformed
        return name

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
                f'{quoted(tool.name)} "\\n"? '
                f"{parameters_rule(builder, tool, _TAGS, is_required=is_required)}"
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
