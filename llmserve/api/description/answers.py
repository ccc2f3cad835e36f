"""The answers of the generation, model and tokenizer routes as pydantic models.

They describe; the handlers build their answers themselves. A test holds the two together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

FinishReason = Literal["stop", "length", "abort", "error"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Answer(BaseModel):
    """Base of all: no field name is taken by pydantic."""

    model_config = ConfigDict(protected_namespaces=())


class CachedTokens(Answer):
    cached_tokens: int = Field(description="prompt tokens that the prefix cache gave")


class ReasoningTokens(Answer):
    reasoning_tokens: int


class Usage(Answer):
    """Token counts; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class PromptToken(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptRows = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Answer):
    """Four parallel lists; the first token of an echoed prompt has no value."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptRows | None = None


class Completion(Answer):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class FunctionCall(Answer):
    name: str
    arguments: str = Field(description="a JSON object as text")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    role: str
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class TopToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopToken):
    top_logprobs: list[TopToken]


class ChatLogprobs(Answer):
    content: list[ChatToken]
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptRows | None = None


class FunctionCallDelta(Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """The first piece of a call has its id and name, the others more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(Answer):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class RenderedRequest(Answer):
    """A prompt and its sampling parameters as the engine would get them."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any] | None
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int


class RenderedCompletion(RootModel[list[RenderedRequest]]):
    """One entry per prompt."""


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Answer):
    """The answer of /detokenize."""

    prompt: str


class TokenizerInfo(Answer):
    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    added_tokens_decoder: dict[str, Any]
    chat_template: str | list[dict[str, Any]] | None


class Health(Answer):
    status: Literal["ok"]


class Version(Answer):
    version: str


class Load(Answer):
    server_load: int = Field(description="requests that the engine has not finished")


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str | None


class Error(Answer):
    """What every answer that is no success holds."""

    error: ErrorDetails
