"""A section of calls between special tokens (DeepSeek V3, R1, V3.1).

V3 and R1 write `function`, a separator, the name, and the arguments as a fenced block of JSON; V3.1
writes the name, a separator and the arguments. Both are read, and grammars let the model choose.
"""
# The bars in the tokens are not ASCII.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder, call_rule, repeated
from llmserve.tool_parsers.sections import SectionParser
from llmserve.tool_parsers.source import Steps

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV3Parser(SectionParser):
    section_end = _SECTION_END
    call_begin = _CALL
    markers = (_SECTION, _CALL)

    def read_call(self) -> Steps[None]:
        source = self.source
        name = (yield from source.until(_SEPARATOR, _CALL_END)).strip()
        yield from source.expect(_SEPARATOR)
        is_fenced = name == "function" and not (yield from source.at("{"))
        if is_fenced:
            name = (yield from source.until("\n", _CALL_END)).strip()
            yield from source.skip_space()
            yield from source.expect(_FENCE)
            yield from source.accept("json")
        self.begin_call(name)
        yield from self.read_object()
        yield from source.skip_space()
        if is_fenced:
            yield from source.expect(_FENCE)
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
        plain, fenced = (
            call_rule(
                builder,
                tools,
                before_name=before_name,
                after_name=after_name,
                after_arguments=after_arguments,
                is_required=is_required,
                is_json=False,
            )
            for before_name, after_name, after_arguments in (
                (_CALL, _SEPARATOR, _CALL_END),
                (f"{_CALL}function{_SEPARATOR}", f"\n{_FENCE}json\n", f"\n{_FENCE}{_CALL_END}"),
            )
        )
        plain = repeated(plain, separator="", is_parallel=is_parallel)
        fenced = repeated(fenced, separator=r'"\n"?', is_parallel=is_parallel)
        body = f"({plain} | {fenced}) {builder.literal(_SECTION_END)}"
        return builder.answer(_SECTION, body, without=cls.markers, is_required=is_required)
