"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` repeated.

Newer vocabularies have the second form, with an id of the model's after `[CALL_ID]` in some.
Ids have nine letters and digits, as Mistral's templates demand.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.json_calls import JsonCallParser
from llmserve.tool_parsers.lark_text import (
    LarkBuilder,
    arguments_schema,
    call_list_rule,
    json_rule,
    quoted,
)
from llmserve.tool_parsers.source import Malformed, Steps

_OPEN = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"[\w.-]*")
_ID = re.compile(r"[0-9A-Za-z]*")


class MistralParser(JsonCallParser):
    markers = (_OPEN,)
    needs_special_tokens = True

    def call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        form = yield from source.at("[", "{")
        if form == "[":
            source.pos += 1
            yield from self.read_call_list()
        elif form == "{":
            yield from self.read_call_object()
        else:
            yield from self._read_named_call()
        self.commit()

    def _read_named_call(self) -> Steps[None]:
        source = self.source
        name = yield from source.take(_NAME)
        call_id = None
        if (yield from source.accept(_CALL_ID)):
            call_id = yield from source.take(_ID)
        if not (yield from source.accept(_ARGS)) and not (yield from source.at("{")):
            raise Malformed
        self.begin_call(name, call_id)
        yield from self.read_object()

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
        if _ARGS not in special_tokens:
            body = call_list_rule(
                builder, tools, key="arguments", is_required=is_required, is_parallel=is_parallel
            )
            is_parallel = False
        else:
            call_id = ""
            if _CALL_ID in special_tokens:
                call_id = f"({builder.literal(_CALL_ID)} /[0-9A-Za-z]{{9}}/)?"
            body = builder.either(
                [
                    f"{quoted(tool.name)} {call_id} {builder.literal(_ARGS)} "
                    + json_rule(arguments_schema(tool, is_required=is_required))
                    for tool in tools
                ]
            )
        return builder.answer(
            _OPEN,
            body,
            without=cls.markers,
            is_required=is_required,
            is_parallel=is_parallel,
        )
