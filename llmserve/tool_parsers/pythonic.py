"""`[f(a=1), g(b="x")]`: Python calls with keyword arguments (Llama 3.2, ToolACE).

The list counts where the text begins or a list just ended. Values that are JSON stay as the model
wrote them, other literals become JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmserve.tool_parsers.argument_writer import ArgumentWriter
from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder
from llmserve.tool_parsers.python_lark import call_list
from llmserve.tool_parsers.python_values import python_to_json, read_python_value
from llmserve.tool_parsers.scanning import ScanningParser
from llmserve.tool_parsers.source import Malformed, Steps

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s=(),'\"\[\]{}]*")


class PythonicParser(ScanningParser):
    bare_markers = ("[",)

    def read_calls(self, marker: str) -> Steps[None]:
        yield from self.read_list()
        self.commit()

    def read_list(self) -> Steps[None]:
        """Reads the calls of a list whose opening bracket has been read."""
        source = self.source
        while True:
            yield from source.skip_space()
            yield from self._read_call()
            yield from source.skip_space()
            if (yield from source.expect(",", "]")) == "]":
                return
            yield from source.skip_space()
            if (yield from source.accept("]")):
                return

    def _read_call(self) -> Steps[None]:
        source = self.source
        start = source.pos
        name = yield from source.take(_NAME)
        if not name or name[0] in "0123456789.-":
            source.pos = start
            raise Malformed
        yield from source.expect("(")
        self.begin_call(name)
        arguments = ArgumentWriter(self.add_arguments, None)
        while True:
            yield from source.skip_space()
            if (yield from source.accept(")")):
                break
            yield from self._read_argument(arguments)
            if (yield from source.expect(",", ")")) == ")":
                break
        arguments.end()

    def _read_argument(self, arguments: ArgumentWriter) -> Steps[None]:
        source = self.source
        start = source.pos
        key = yield from source.take(_KEY)
        yield from source.skip_space()
        if not key or not (yield from source.accept("=")):
            source.pos = start
            raise Malformed
        arguments.begin(key)
        value = python_to_json((yield from read_python_value(source)))
        if value is None:
            raise Malformed
        arguments.add_json(value)

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
        if is_required:
            return builder.build(calls)
        return builder.build(f"{calls} | {builder.text(without=(), not_at_start='[')}")
