"""One choice of a chat answer: from the engine's deltas to reasoning, content and tool calls.

The text passes the reasoning parser, then the tool parser, as it arrives; so a streamed answer
and an unstreamed one say the same.
"""

from __future__ import annotations

from typing import Any

from llmserve.api.call_repeats import CallHistory
from llmserve.api.logprobs import TokenNames, chat_logprobs
from llmserve.api.output_plan import OutputPlan
from llmserve.api.schemas import ChatRequest
from llmserve.api.tool_choice import ToolMode
from llmserve.core import FinishReason, OutputDelta
from llmserve.tool_parsers import CallDelta


class ChatChoice:
    """What `add` takes in is given out once, as JSON."""

    def __init__(
        self, index: int, request: ChatRequest, plan: OutputPlan, names: TokenNames
    ) -> None:
        self.index = index
        self._request = request
        self._plan = plan
        self._names = names
        self._visible = plan.visible_text()
        self._reasoning_parser = plan.reasoning_parser()
        self._tool_parser = plan.tool_parser()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._has_calls = False
        self._history = CallHistory() if plan.choice.is_forced else None
        self._begun: list[str] = []  # of a forced answer: the beginning of a call without its name
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that added to the reasoning, whether the answer shows it or not."""
        return 0 if self._visible is None else self._visible.num_reasoning_tokens

    def add(self, delta: OutputDelta) -> None:
        is_last = delta.finish_reason is not None
        text = delta.text if self._visible is None else self._visible.feed(delta)
        self._add_text(text, is_last=is_last)
        if self._visible is not None and self._reasoning_parser is not None:
            self._visible.count_reasoning(self._reasoning_parser, is_last=is_last)
        if self._request.logprobs:
            self._logprobs += chat_logprobs(delta, self._names)
        if self._request.return_token_ids:
            self._token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self._stop_reason = delta.stop_reason
            # As OpenAI and vLLM have it, a call that the request named is no reason to end.
            is_reason = self._has_calls and self._plan.choice.mode is not ToolMode.NAMED
            if self._tool_parser is not None:
                is_reason = is_reason and not self._is_broken
                self._plan.count_parsing(self._plan.choice.mode.value, self._outcome)
            if is_reason and delta.finish_reason is FinishReason.STOP:
                self.finish_reason = "tool_calls"

    def message(self, role: str) -> dict[str, Any]:
        """The choice of an unstreamed answer."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
        if self._plan.reasoning is not None and self._plan.includes_reasoning:
            reasoning = "".join(self._reasoning)
            message |= _both_names(reasoning or None)
            message["content"] = content if content or not reasoning else None
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = _whole_calls(self._calls)
        choice = {"index": self.index, "message": message}
        return self._with_details(choice, is_last=True)

    def chunks(self) -> list[dict[str, Any]]:
        """The choices of the chunks that say what is new; the last one why the text ended."""
        deltas: list[dict[str, Any]] = []
        if reasoning := "".join(self._reasoning):
            deltas.append(_both_names(reasoning))
        if content := "".join(self._content):
            deltas.append({"content": content})
        if self._calls:
            deltas.append({"tool_calls": [_call_json(call) for call in _merged(self._calls)]})
        self._reasoning, self._content, self._calls = [], [], []
        choices = [
            self._with_details({"index": self.index, "delta": delta}, is_last=False)
            for delta in deltas
        ]
        if self.finish_reason is not None:
            last = {"index": self.index, "delta": {}}
            choices.append(self._with_details(last, is_last=True))
        return choices

    def _add_text(self, text: str, *, is_last: bool) -> None:
        if self._reasoning_parser is None:
            self._add_answer(text, is_last=is_last)
            return
        part = self._reasoning_parser.feed(text)
        self._add_reasoning(part.reasoning)
        content = part.content
        if is_last:
            rest = self._reasoning_parser.flush()
            self._add_reasoning(rest.reasoning)
            content += rest.content
        self._add_answer(content, is_last=is_last)

    def _add_reasoning(self, text: str) -> None:
        if self._plan.includes_reasoning:
            self._reasoning.append(text)

    def _add_answer(self, text: str, *, is_last: bool) -> None:
        """Text behind the reasoning."""
        if self._tool_parser is None:
            self._content.append(text)
            return
        parts = [self._tool_parser.feed(text)]
        if is_last:
            parts.append(self._tool_parser.flush())
        calls = [call for part in parts for call in part.calls]
        if self._history is None:
            self._content += [part.content for part in parts]
        else:  # what is not a call is the beginning of one that was cut off
            self._begun += [part.content for part in parts]
            calls = self._history.add(calls) + (self._history.release() if is_last else [])
            if is_last and not calls and not self._has_calls:
                self._content += self._begun
        self._calls += [call for call in calls if call.index == 0 or self._plan.is_parallel]
        self._has_calls = self._has_calls or bool(self._calls)

    @property
    def _is_broken(self) -> bool:
        """Whether a call is incomplete; one that repeats another, or became content, may be."""
        if self._tool_parser is None or (self._history is not None and self._history.has_repeat):
            return False
        is_in_answer = self._plan.is_constrained or not self._has_calls
        return self._tool_parser.is_broken and is_in_answer

    @property
    def _outcome(self) -> str:
        """What became of the search for calls, for the metrics."""
        if self._is_broken:
            return "error"
        if self._has_calls:
            return "success"
        return "error" if self._plan.choice.is_forced else "none"

    def _with_details(self, choice: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        rows, self._logprobs = self._logprobs, []
        has_rows = self._request.logprobs and (rows or "message" in choice)
        choice["logprobs"] = {"content": rows, "refusal": None} if has_rows else None
        choice["finish_reason"] = self.finish_reason if is_last else None
        if is_last:
            choice["stop_reason"] = self._stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = self._token_ids
            self._token_ids = []
        return choice


def _both_names(reasoning: str | None) -> dict[str, Any]:
    """Clients read the one or the other."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _merged(calls: list[CallDelta]) -> list[CallDelta]:
    """One piece per call of what arrived together."""
    merged: list[CallDelta] = []
    for call in calls:
        if merged and merged[-1].index == call.index:
            merged[-1].arguments += call.arguments
        else:
            merged.append(CallDelta(call.index, call.id, call.name, call.arguments))
    return merged


def _call_json(call: CallDelta) -> dict[str, Any]:
    """The first piece of a call has its id and name, the others more of its arguments."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(calls: list[CallDelta]) -> list[dict[str, Any]]:
    whole = [_call_json(call) for call in _merged(calls)]
    return [{key: value for key, value in call.items() if key != "index"} for call in whole]
