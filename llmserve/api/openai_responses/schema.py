"""The bodies of POST /v1/responses and /v1/responses/input_tokens.

What a chat request shares with them is checked by chat; here is what they name differently, and
what this server does not do and therefore refuses by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from llmserve.api.fields import checked, integer, real, refuse, refuse_unsupported
from llmserve.api.openai_responses.items import check_input
from llmserve.api.schemas import STOP_SCHEMA

MAX_TOP_LOGPROBS = 20
_INCLUDABLE = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
    *("code_interpreter_call.outputs", "reasoning.encrypted_content"),
    "message.output_text.logprobs",
)

_STRING = {"type": "string"}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "id": _STRING,
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {
            "anyOf": [_STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
        },
        "call_id": _STRING,
        "name": _STRING,
        "arguments": _STRING,
        "output": {"anyOf": [_STRING, {"type": "array", "items": {"type": "object"}}]},
    },
}
_INPUT = {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _ITEM}]}
_TOOL = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "minLength": 1},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": _STRING,
        "schema": {"type": "object"},
    },
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["function", "allowed_tools"]}, "name": _STRING},
        },
    ]
}
_METADATA = {"type": "object", "maxProperties": 16, "additionalProperties": _STRING}


def _tools(value: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        refuse(field, value, "a list of tools")
    for position, tool in enumerate(value):
        where = f"{field}[{position}]"
        if not isinstance(tool, dict):
            refuse(where, tool, "an object with the type function")
        kind = tool.get("type")
        if not isinstance(kind, str):
            refuse(f"{where}.type", kind, "function")
        if kind != "function":
            refuse_unsupported(where, f"tools of the type {kind!r} are not built in; use function")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            refuse(f"{where}.name", tool.get("name"), "the name of a function")
        if not isinstance(tool.get("parameters"), dict | None):
            refuse(f"{where}.parameters", tool["parameters"], "a JSON schema")
    return value


def _tool_choice(value: object, field: str) -> str | dict[str, Any]:
    if value in ("none", "auto", "required"):
        return str(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        refuse(field, value, "none, auto, required or an object naming a function")
    if kind not in ("function", "allowed_tools"):
        refuse_unsupported(f"{field}.type", f"tools of the type {kind!r} are not built in")
    if kind == "function" and not isinstance(value.get("name"), str):
        refuse(f"{field}.name", value.get("name"), "the name of a function in tools")
    if kind == "allowed_tools" and not isinstance(value.get("tools"), list):
        refuse(f"{field}.tools", value.get("tools"), "a list of functions")
    return value


def _include(value: object, field: str) -> list[str]:
    if not isinstance(value, list):
        refuse(field, value, "a list of strings")
    for position, item in enumerate(value):
        if item not in _INCLUDABLE:
            refuse(f"{field}[{position}]", item, f"one of {', '.join(_INCLUDABLE)}")
    return value


def _format(value: object, field: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        refuse("text.format.type", kind, "text, json_object or json_schema")
    if kind == "json_schema" and not isinstance(value.get("schema"), dict):
        refuse("text.format.schema", value.get("schema"), "a JSON schema")
    return value


def _metadata(value: object, field: str) -> dict[str, str]:
    if not isinstance(value, dict):
        refuse(field, value, "an object of up to 16 strings")
    if len(value) > 16:
        refuse(field, value, f"one of up to 16 strings, not {len(value)}")
    for name, item in value.items():
        if not isinstance(item, str):
            refuse(f"{field}.{name}", item, "a string")
    return value


def _only(*allowed: object) -> Any:
    """A field of which this server takes these values only."""

    def check(value: object, field: str) -> object:
        if value not in allowed:
            words = ", ".join(str(item).lower() for item in allowed)
            refuse_unsupported(field, f"only {words} is accepted" if words else "leave it out")
        return value

    return checked(check, {"enum": list(allowed)})


class Reasoning(BaseModel):
    """How much the model shall think."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextConfig(BaseModel):
    """What the text shall look like."""

    model_config = ConfigDict(strict=True)

    format: Annotated[dict[str, Any], checked(_format, _FORMAT)] = {"type": "text"}
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesPrompt(BaseModel):
    """The fields that decide the prompt."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    input: Annotated[list[dict[str, Any]], checked(check_input, _INPUT)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], checked(_tools, {"type": "array", "items": _TOOL})] = []
    tool_choice: Annotated[str | dict[str, Any] | None, checked(_tool_choice, _TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextConfig = TextConfig()
    conversation: Annotated[None, _only()] = None
    truncation: Annotated[Literal["disabled"], _only("disabled")] = "disabled"


class ResponsesRequest(ResponsesPrompt):
    """POST /v1/responses."""

    max_output_tokens: Annotated[int, integer(1)] | None = None
    temperature: Annotated[float, real(0, 2)] | None = None
    top_p: Annotated[float, real(0, 1, is_low_excluded=True)] | None = None
    top_k: Annotated[int, integer(-1, requirement="-1 or 0 (off) or a positive integer")] | None = (
        None
    )
    stop: Annotated[Any, WithJsonSchema(STOP_SCHEMA)] = None  # as in chat, which checks it
    top_logprobs: Annotated[int, integer(0, MAX_TOP_LOGPROBS)] = 0
    include: Annotated[
        list[str], checked(_include, {"type": "array", "items": {"enum": list(_INCLUDABLE)}})
    ] = []
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    store: bool = True
    metadata: Annotated[dict[str, str], checked(_metadata, _METADATA)] = {}
    max_tool_calls: Annotated[int, integer(1)] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    background: Annotated[bool, _only(False)] = False
    prompt: Annotated[None, _only()] = None
    context_management: Annotated[None, _only([])] = None
    moderation: Annotated[None, _only()] = None

    @property
    def has_logprobs(self) -> bool:
        return self.top_logprobs > 0 or "message.output_text.logprobs" in self.include


# Accepted because clients send them; they change nothing here.
NO_EFFECT_FIELDS = frozenset(
    {
        *("max_tool_calls", "service_tier", "user", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "stream_options"),
    }
)
