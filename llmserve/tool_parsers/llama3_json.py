"""`{"name": ..., "parameters": {...}}`, several separated by `;`, after `<|python_tag|>` or bare.

A bare object counts wherever it is in the text, if it has a name, parameters (or arguments) and
nothing that calls do not have (Llama 3.1 to 4).
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.json_calls import JsonCallParser
from llmserve.tool_parsers.lark_text import LarkBuilder, call_rule, quoted, repeated
from llmserve.tool_parsers.source import Steps

_TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    needs_special_tokens = True

    def __init__(self, tools: list[Tool], *, is_constrained: bool = False) -> None:
        super().__init__(tools, is_constrained=is_constrained)
        # The grammar lets free text have any braces that are not where a call would begin.
        self.markers = (_TAG,) if is_constrained else (_TAG, "{")
        self.bare_markers = ("{",)

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        if marker == "{":
            source.pos -= 1
        while True:
            yield from source.skip_space()
            yield from self.read_call_object(is_bare=True)
            self.commit()
            end = source.pos
            yield from source.skip_space()
            if (yield from source.accept(";")):
                yield from source.skip_space()
                if (yield from source.at("{", _TAG)):
                    self.commit()
                    yield from source.accept(_TAG)
                    continue
            source.pos = end
            return

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
            after_name='", "parameters": ',
            after_arguments="}",
            is_required=is_required,
        )
        calls = repeated(call, separator=quoted("; "), is_parallel=is_parallel)
        calls = builder.rule(f"{builder.literal(_TAG)}? {calls}")
        if is_required:
            return builder.build(calls)
        text = builder.text(without=(_TAG,), not_at_start="{")
        return builder.build(f"{calls} | {text}")
