"""gpt-oss: messages in the harmony format, each in a channel.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: the
analysis is reasoning; final, and commentary to nobody, is content. A message to a function is
passed on as content with its header and end, for the tool parser.
"""

from __future__ import annotations

import enum

from llmserve.reasoning_parsers.base import ReasoningDelta, ReasoningParser, Thinking
from llmserve.reasoning_parsers.markers import find_first, open_overlap

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_ENDS = (_END, _RETURN, _CALL)
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
# What a header begins with; the prompt may have ended with the role.
_HEADER_STARTS = (_START, _CHANNEL, "to=", "assistant")


class _At(enum.Enum):
    HEADER = enum.auto()
    ANALYSIS = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()
    PLAIN = enum.auto()  # text without the format, to the end


class GptOssParser(ReasoningParser):
    """Output that does not begin with a header (a grammar made it, say) is content."""

    start_marker = _ANALYSIS
    end_marker = f"{_END}{_START}assistant{_FINAL}"
    thinking_ends = (_END, _START)
    marker_before_calls = f"{_END}{_START}assistant"
    may_call_while_thinking = True
    markers = (_START, _CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>")

    def __init__(self, prompt: str, *, continued: str = "", hides_markers: bool = False) -> None:
        super().__init__(prompt, continued=continued, hides_markers=hides_markers)
        if self.thinking is Thinking.OPEN:
            self._at = _At.ANALYSIS
        elif self.thinking is Thinking.OFF:
            self._at = _At.CONTENT
        else:
            self._at = _At.HEADER

    @classmethod
    def find_thinking(cls, prompt: str, continued: str) -> Thinking:
        end = prompt.rstrip()
        if continued or end.endswith(_FINAL):
            return Thinking.OFF
        return Thinking.OPEN if end.endswith(_ANALYSIS) else Thinking.OPTIONAL

    def feed(self, text: str) -> ReasoningDelta:
        self._pending += text
        delta = ReasoningDelta()
        while self._advance(delta):
            pass
        return delta

    def flush(self) -> ReasoningDelta:
        delta = ReasoningDelta()
        if self._at is _At.ANALYSIS:
            delta.reasoning = self._take_reasoning(len(self._pending))
        elif self._at is not _At.HEADER or find_first(self._pending, self.markers) is None:
            delta.content = self._take(len(self._pending))
        else:
            self._take(len(self._pending))  # a header without a message
        return delta

    def _advance(self, delta: ReasoningDelta) -> bool:
        """Consumes up to the next marker; False when more text is needed."""
        if self._at is _At.PLAIN:
            delta.content += self._take(len(self._pending))
            return False
        if self._at is _At.HEADER:
            return self._read_header(delta)
        return self._read_message(delta)

    def _read_header(self, delta: ReasoningDelta) -> bool:
        if self._is_plain(self._pending.lstrip()):
            self._at = _At.PLAIN
            return True
        position = self._pending.find(_MESSAGE)
        if position < 0:
            return False
        header = self._take(position + len(_MESSAGE)).lstrip().removeprefix(_START)
        role, _, channel = header.partition(_CHANNEL)
        if "to=functions." in header:
            self._at = _At.CALL
            recipient = role.strip().removeprefix("assistant").strip()
            name, _, rest = channel.partition(" ") if recipient else (channel, "", "")
            delta.content += _CHANNEL + " ".join(part for part in (name, recipient, rest) if part)
        else:
            is_analysis = channel.startswith("analysis")
            self._at = _At.ANALYSIS if is_analysis else _At.CONTENT
        return True

    def _is_plain(self, text: str) -> bool:
        """Whether it cannot be a header."""
        return not any(text.startswith(start) or start.startswith(text) for start in _HEADER_STARTS)

    def _read_message(self, delta: ReasoningDelta) -> bool:
        # A start or a channel in a message means that its end was forgotten.
        stops = (*_ENDS, _START, _CHANNEL)
        found = find_first(self._pending, stops)
        size = len(self._pending) - open_overlap(self._pending, stops)
        if found is not None:
            size = found[0]
        if self._at is _At.ANALYSIS:
            delta.reasoning += self._take_reasoning(size)
        else:
            delta.content += self._take(size)
        if found is None:
            return False
        if found[1] in _ENDS:
            end = self._take(len(found[1]))
            if self._at is _At.CALL:
                delta.content += end
        self._at = _At.HEADER
        return True
