"""Messages to functions in the harmony format (gpt-oss).

<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The recipient may also come with the role, before the channel. The parser of the reasoning takes
the other messages apart; without it they are content as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmserve.tool_parsers.base import Tool
from llmserve.tool_parsers.lark_text import LarkBuilder, call_rule
from llmserve.tool_parsers.scanning import ScanningParser
from llmserve.tool_parsers.source import Malformed, Steps

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CALL = "<|call|>"
_ENDS = (_CALL, "<|end|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([^\s<]+)")
_TO = "to=functions."
_NEXT = f"{_START}assistant"


class OpenAIHarmonyParser(ScanningParser):
    markers = (_START, _CHANNEL)
    needs_special_tokens = True
    covers_thinking = True

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        header = ""
        if marker == _START:
            header = (yield from source.until(_CHANNEL, _MESSAGE, _START)) + " "
            if not (yield from source.accept(_CHANNEL)):
                raise Malformed
        start = source.pos
        header += yield from source.until(_MESSAGE, _CHANNEL, _START)
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            source.pos = start
            raise Malformed
        yield from source.expect(_MESSAGE)
        self.begin_call(recipient[1])
        yield from self.read_object()
        yield from source.skip_space()
        if not (yield from source.accept(*_ENDS)):
            rest = source.text[source.pos :]
            if not (source.is_ended and any(end.startswith(rest) for end in _ENDS)):
                raise Malformed
            source.pos = len(source.text)
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
            before_name=f"{_CHANNEL}commentary {_TO}",
            after_name=f" <|constrain|>json{_MESSAGE}",
            after_arguments="",
            is_required=is_required,
            is_json=False,
        )
        after_call = builder.literal(f"{_CALL}{_NEXT}")
        calls = f"{call} ({after_call} {call})*" if is_parallel else call
        calls = f"{calls} {builder.literal(_CALL)}?"
        # The model thinks first, and may say what it is about to do.
        names = (
            '("analysis" | "commentary")'
            if is_required
            else '("analysis" | "commentary" | "final")'
        )
        message = builder.rule(
            f"{builder.literal(_CHANNEL)} {names} {builder.literal(_MESSAGE)} "
            f"{builder.up_to('<|end|>' + _NEXT, without=(*_ENDS, _START, _CHANNEL))}"
        )
        if is_required:
            return builder.build(f"{message}* {calls}")
        final = builder.rule(
            f"{builder.literal(f'{_CHANNEL}final{_MESSAGE}')} "
            f"{builder.text(without=(*_ENDS, _START, _CHANNEL))}"
        )
        return builder.build(f"{message}* ({calls} | {final})")
