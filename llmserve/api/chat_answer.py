"""Chat answers as JSON: the whole of one, or its chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from llmserve.api.chat_choice import ChatChoice
from llmserve.api.logprobs import prompt_logprobs
from llmserve.api.output_plan import OutputPlan
from llmserve.api.preparation import Prepared
from llmserve.api.schemas import ChatRequest
from llmserve.api.sse import Event
from llmserve.api.streams import Streams
from llmserve.api.usage import UsageCounter
from llmserve.core import OutputDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrepared(Prepared[ChatRequest]):
    """A checked chat request, and how its output is read."""

    plan: OutputPlan

    def usage_counter(self) -> UsageCounter:
        counter = Prepared.usage_counter(self)
        counter.num_reasoning_tokens = {}
        return counter

    def new_choices(self) -> list[ChatChoice]:
        return [
            ChatChoice(index, self.request, self.plan, self.names)
            for index in range(self.request.n)
        ]


def make_answer(prepared: ChatPrepared, collected: list[OutputDelta], role: str) -> dict[str, Any]:
    """The answer to an unstreamed request."""
    request, usage = prepared.request, prepared.usage_counter()
    choices = prepared.new_choices()
    for delta in collected:
        _add(choices[delta.index], usage, delta)
    answer = {
        **prepared.envelope("chat.completion"),
        "choices": [choice.message(role) for choice in choices],
        "usage": usage.as_json(),
    }
    if request.return_token_ids:
        answer["prompt_token_ids"] = prepared.prompts[0].token_ids
    if request.prompt_logprobs is not None:
        rows = next((d.prompt_logprobs for d in collected if d.prompt_logprobs is not None), [])
        answer["prompt_logprobs"] = prompt_logprobs(
            rows, prepared.names, limit=request.prompt_logprobs
        )
    return answer


def answer_size(prepared: ChatPrepared, collected: list[OutputDelta]) -> int:
    """Roughly the bytes that building the answer goes through."""
    request = prepared.request
    size = sum(len(delta.token_ids) for delta in collected) * 8
    if request.logprobs:
        size *= 16 * (1 + (request.top_logprobs or 0))
    if request.prompt_logprobs is not None:
        size += len(prepared.prompts[0].token_ids) * 64 * (1 + request.prompt_logprobs)
    return size


async def stream_chunks(
    prepared: ChatPrepared, streams: Streams, role: str
) -> AsyncGenerator[list[Event], None]:
    """The chunks of a streamed answer."""
    request, usage = prepared.request, prepared.usage_counter()
    envelope = prepared.envelope("chat.completion.chunk")
    choices = prepared.new_choices()

    def chunk(choice: dict[str, Any]) -> Event:
        event = {**envelope, "choices": [choice]}
        if request.continuous_usage:
            event["usage"] = usage.as_json()
        elif request.include_usage:
            event["usage"] = None
        return event

    first = [chunk(_role_choice(index, role)) for index in range(request.n)]
    if request.return_token_ids:
        first[0]["prompt_token_ids"] = prepared.prompts[0].token_ids
    yield first
    async for batch in streams.batches():
        events: list[Event] = []
        for _, delta in batch:
            choice = choices[delta.index]
            _add(choice, usage, delta)
            events += map(chunk, choice.chunks())
        if events:
            yield events
    if request.include_usage:
        yield [{**envelope, "choices": [], "usage": usage.as_json()}]


def _add(choice: ChatChoice, usage: UsageCounter, delta: OutputDelta) -> None:
    choice.add(delta)
    usage.add(0, delta)
    if usage.num_reasoning_tokens is not None:
        usage.num_reasoning_tokens[choice.index] = choice.num_reasoning_tokens


def _role_choice(index: int, role: str) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": role, "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
