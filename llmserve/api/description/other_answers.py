"""The answers of /v1/responses and /v1/messages: what every one of them has.

Both APIs have many more types than a client of this server meets; see their own references.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llmserve.api.description.answers import Answer


class OpenAnswer(BaseModel):
    """Has more fields than are listed."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")


class OutputItem(OpenAnswer):
    type: str
    id: str


class Response(OpenAnswer):
    """A response of OpenAI's Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]
    output: list[OutputItem]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Answer):
    object: Literal["list"]
    data: list[OpenAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ContentBlock(OpenAnswer):
    type: Literal["text", "thinking", "tool_use"]


class MessagesUsage(OpenAnswer):
    input_tokens: int
    output_tokens: int


class Message(Answer):
    """A message of Anthropic's Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "tool_use", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageTokens(Answer):
    input_tokens: int


class AnthropicErrorDetails(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    """What every answer under /v1/messages that is no success holds."""

    type: Literal["error"]
    error: AnthropicErrorDetails
