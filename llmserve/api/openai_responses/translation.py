"""From the body of a Responses request to a chat request, and the response object around both."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from llmserve.api.body import parse_object
from llmserve.api.chat_answer import ChatPrepared
from llmserve.api.chat_source import (
    PASSED_FIELDS,
    count_prompt_tokens,
    note_beside_prompt,
    passed_fields,
    prepare_translated,
    refuse_chat_names,
)
from llmserve.api.context import ApiContext
from llmserve.api.fields import validate
from llmserve.api.openai_responses.items import new_id, to_messages
from llmserve.api.openai_responses.schema import (
    NO_EFFECT_FIELDS,
    ResponsesPrompt,
    ResponsesRequest,
)

# What Responses calls the fields of chat.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The body of POST /v1/responses."""

    request: ResponsesRequest
    fields: dict[str, Any]  # as sent

    def ignored(self, *, is_store_enabled: bool) -> list[str]:
        """Names of fields without effect."""
        names = [
            name
            for name, value in self.fields.items()
            if value is not None
            and name not in PASSED_FIELDS
            and (name in NO_EFFECT_FIELDS or name not in ResponsesRequest.model_fields)
        ]
        reasoning = self.request.reasoning
        names += [
            f"reasoning.{k}" for k in ("summary", "generate_summary") if getattr(reasoning, k)
        ]
        names += [] if self.request.text.verbosity is None else ["text.verbosity"]
        names += [name for name in self.request.include if name != "message.output_text.logprobs"]
        names += ["store"] if self.fields.get("store") and not is_store_enabled else []
        return names


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked request, ready to run."""

    parsed: ParsedRequest
    chat: ChatPrepared
    is_stored: bool
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))


def parse_request(body: bytes) -> ParsedRequest:
    """Raises RequestError."""
    fields = parse_object(body)
    request = validate(ResponsesRequest, fields)
    refuse_chat_names(fields, ResponsesRequest, _NAMES)
    return ParsedRequest(request, fields)


def prepare_response(
    parsed: ParsedRequest,
    history: list[bytes],
    context: ApiContext,
    request_id: str,
    *,
    is_store_enabled: bool,
) -> PreparedResponse:
    """Raises RequestError. history: items of the conversation so far, as JSON lists."""
    request = parsed.request
    fields = passed_fields(parsed.fields) | _prompt_fields(request, history)
    if request.stop is not None:
        fields["stop"] = request.stop
    for name in ("temperature", "top_p", "top_k"):
        if getattr(request, name) is not None:
            fields[name] = getattr(request, name)
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.has_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    response_format = _response_format(request.text.format)
    if response_format is not None:
        fields["response_format"] = response_format
    return PreparedResponse(
        parsed=parsed,
        chat=prepare_translated(
            fields,
            context,
            request_id,
            names=_NAMES,
            ignored=parsed.ignored(is_store_enabled=is_store_enabled),
        ),
        is_stored=request.store and is_store_enabled,
    )


def count_input_tokens(
    request: ResponsesPrompt, sent: dict[str, Any], history: list[bytes], context: ApiContext
) -> tuple[int, dict[str, str]]:
    """The count, and a header that names fields without effect. Raises RequestError.

    sent: the body that `request` was made of.
    """
    headers = note_beside_prompt(sent, ResponsesPrompt, context)
    fields = passed_fields(sent) | _prompt_fields(request, history)
    return count_prompt_tokens(fields, context, _NAMES), headers


def _prompt_fields(request: ResponsesPrompt, history: list[bytes]) -> dict[str, Any]:
    items = [item for chunk in history for item in orjson.loads(chunk)]
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": to_messages(request.instructions, [*items, *request.input]),
    }
    if request.tools:
        fields["tools"] = [_chat_tool(tool) for tool in request.tools]
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.tool_choice is not None:
        fields["tool_choice"] = _chat_tool_choice(request.tool_choice)
    if request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    return fields


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = [
        {"type": "function", "function": {"name": tool.get("name")}}
        for tool in choice["tools"]
        if isinstance(tool, dict)
    ]
    allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _response_format(format: dict[str, Any]) -> dict[str, Any] | None:
    if format["type"] != "json_schema":
        return None if format["type"] == "text" else {"type": format["type"]}
    keys = ("name", "description", "schema", "strict")
    inner = {key: format[key] for key in keys if format.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": "schema", **inner}}


def response_object(prepared: PreparedResponse, status: str) -> dict[str, Any]:
    """The response without its output; `output` is the caller's to fill in."""
    request, chat = prepared.parsed.request, prepared.chat
    sampling = chat.generations[0].sampling
    return {
        "id": prepared.id,
        "object": "response",
        "created_at": prepared.created,
        "status": status,
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier or "default",
        "store": prepared.is_stored,
        "temperature": sampling.temperature,
        "text": {"format": request.text.format, "verbosity": request.text.verbosity or "medium"},
        "tool_choice": request.tool_choice or ("auto" if request.tools else "none"),
        "tools": request.tools,
        "top_logprobs": request.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": request.truncation,
        "usage": None,
        "user": request.user,
    }


def responses_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Chat's usage in the words of Responses."""
    prompt_details = usage.get("prompt_tokens_details") or {}
    output_details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": prompt_details.get("cached_tokens", 0),
            "cache_write_tokens": 0,  # nothing is charged for, so nothing is counted
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": output_details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
