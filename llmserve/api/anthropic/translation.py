"""From the body of a Messages request to a chat request."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from llmserve.api.anthropic.blocks import is_prefilled, to_chat
from llmserve.api.anthropic.schema import NO_EFFECT_FIELDS, CountTokensRequest, MessagesRequest
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
from llmserve.api.fields import refuse, validate
from llmserve.errors import RequestError

# What Messages calls the fields of chat.
_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking.budget_tokens",
    "include_reasoning": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """A checked request, ready to run."""

    request: MessagesRequest
    chat: ChatPrepared
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def prepare_message(body: bytes, context: ApiContext, request_id: str) -> PreparedMessage:
    """Raises RequestError."""
    sent = parse_object(body)
    request = validate(MessagesRequest, sent)
    refuse_chat_names(sent, MessagesRequest, _NAMES)
    ignored = [
        name
        for name, value in sent.items()
        if value is not None
        and name not in PASSED_FIELDS
        and (name in NO_EFFECT_FIELDS or name not in MessagesRequest.model_fields)
    ]
    fields = passed_fields(sent)
    fields |= _prompt_fields(request, fields, context)
    fields["max_tokens"] = request.max_tokens
    for name in ("temperature", "top_p", "top_k"):
        if getattr(request, name) is not None:
            fields[name] = getattr(request, name)
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    fields |= _thinking_fields(request)
    if context.formats.reasoning is None and fields.pop("thinking_token_budget", None) is not None:
        ignored.append("thinking.budget_tokens")
    format = _output_format(request)
    if format is not None:
        schema = {"name": "output", "schema": format["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return PreparedMessage(
        request,
        prepare_translated(fields, context, request_id, names=_NAMES, ignored=ignored),
    )


def count_message_tokens(body: bytes, context: ApiContext) -> tuple[int, dict[str, str]]:
    """The count, and a header that names fields without effect. Raises RequestError."""
    sent = parse_object(body)
    request = validate(CountTokensRequest, sent)
    headers = note_beside_prompt(sent, CountTokensRequest, context)
    fields = passed_fields(sent)
    fields |= _prompt_fields(request, fields, context)
    return count_prompt_tokens(fields, context, _NAMES), headers


def _prompt_fields(
    request: CountTokensRequest, passed: dict[str, Any], context: ApiContext
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": to_chat(request.system, request.messages),
    }
    if is_prefilled(request.messages):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        fields["tools"] = [_chat_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        choice = request.tool_choice
        fields["tool_choice"] = _chat_tool_choice(choice)
        fields["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if request.output_config.get("effort") is not None:
        fields["reasoning_effort"] = request.output_config["effort"]
    if request.thinking is not None:
        # Templates of different families ask for one or the other.
        is_on = request.thinking["type"] != "disabled"
        variables = passed.get("chat_template_kwargs", {})
        if isinstance(variables, dict):  # else the check of chat's fields refuses it
            template = passed.get("chat_template")
            words = context.formats.words_of(template if isinstance(template, str) else None)
            own = {"enable_thinking", "thinking"} & words
            variables = dict.fromkeys(own, is_on) | variables
        fields["chat_template_kwargs"] = variables
    return fields


def _output_format(request: MessagesRequest) -> dict[str, Any] | None:
    """Older clients write it beside output_config instead of in it."""
    format: dict[str, Any] | None = request.output_config.get("format")
    if format is not None and request.output_format is not None:
        raise RequestError(
            "output_format and output_config.format are the same; set one of them",
            param="output_format",
        )
    return format or request.output_format


def _thinking_fields(request: MessagesRequest) -> dict[str, Any]:
    thinking = request.thinking
    if thinking is None:
        return {}
    if thinking["type"] == "disabled" or thinking.get("display") == "omitted":
        return {"include_reasoning": False}
    if thinking["type"] == "adaptive":
        return {}
    budget = thinking["budget_tokens"]
    if budget >= request.max_tokens:
        refuse("thinking.budget_tokens", budget, f"below max_tokens, which is {request.max_tokens}")
    return {"thinking_token_budget": budget}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return _TOOL_CHOICES[choice["type"]]
