"""What there is to say of each route: its request, its answer, its errors."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from llmserve.api.anthropic.schema import CountTokensRequest, MessagesRequest
from llmserve.api.description import answers, other_answers
from llmserve.api.openai_responses.schema import ResponsesPrompt, ResponsesRequest
from llmserve.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)


@dataclass(frozen=True, slots=True)
class QueryParameter:
    name: str
    schema: dict[str, object]
    description: str


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """`chunk` is what the events of a stream hold; None: the route has no stream.

    `extra_statuses` come on top of those that every route of its kind may have.
    """

    summary: str
    tag: str
    answer: type[BaseModel] | None = None  # None: the answer is text
    request: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    query: tuple[QueryParameter, ...] = ()
    extra_statuses: tuple[int, ...] = ()
    is_open: bool = False  # needs no API key


_PAGE = (
    QueryParameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "items per page"),
    QueryParameter("order", {"enum": ["asc", "desc"]}, "newest first by default"),
    QueryParameter("after", {"type": "string"}, "id of the item before the page"),
)
_AGAIN = (QueryParameter("stream", {"enum": ["false"]}, "streaming again is not supported"),)
_HEALTH = RouteDescription(
    "Whether requests are taken", "server", answers.Health, extra_statuses=(503,), is_open=True
)

# By method and path, as the router has it.
ROUTES: dict[tuple[str, str], RouteDescription] = {
    ("POST", "/v1/chat/completions"): RouteDescription(
        "Continue a conversation",
        "generation",
        answers.ChatCompletion,
        ChatRequest,
        answers.ChatCompletionChunk,
    ),
    ("POST", "/v1/completions"): RouteDescription(
        "Continue prompts",
        "generation",
        answers.Completion,
        CompletionRequest,
        answers.CompletionChunk,
    ),
    ("POST", "/v1/responses"): RouteDescription(
        "Create a response (OpenAI's Responses API)",
        "generation",
        other_answers.Response,
        ResponsesRequest,
        other_answers.OpenAnswer,
    ),
    ("GET", "/v1/responses/{id}"): RouteDescription(
        "Read a stored response", "responses", other_answers.Response, query=_AGAIN
    ),
    ("DELETE", "/v1/responses/{id}"): RouteDescription(
        "Forget a stored response", "responses", other_answers.DeletedResponse
    ),
    ("POST", "/v1/responses/{id}/cancel"): RouteDescription(
        "End a running response", "responses", other_answers.Response
    ),
    ("GET", "/v1/responses/{id}/input_items"): RouteDescription(
        "Read the input of a stored response", "responses", other_answers.InputItems, query=_PAGE
    ),
    ("POST", "/v1/responses/input_tokens"): RouteDescription(
        "Count the tokens of a response's prompt",
        "responses",
        other_answers.InputTokens,
        ResponsesPrompt,
    ),
    ("POST", "/v1/messages"): RouteDescription(
        "Create a message (Anthropic's Messages API)",
        "generation",
        other_answers.Message,
        MessagesRequest,
        other_answers.OpenAnswer,
    ),
    ("POST", "/v1/messages/count_tokens"): RouteDescription(
        "Count the tokens of a message's prompt",
        "generation",
        other_answers.MessageTokens,
        CountTokensRequest,
    ),
    ("GET", "/v1/models"): RouteDescription("List the models", "models", answers.ModelList),
    ("GET", "/v1/models/{id}"): RouteDescription("Describe a model", "models", answers.ModelCard),
    ("POST", "/tokenize"): RouteDescription(
        "Turn a prompt or a conversation into token ids",
        "tokens",
        answers.Tokens,
        TokenizeRequest,
    ),
    ("POST", "/detokenize"): RouteDescription(
        "Turn token ids into text", "tokens", answers.Text, DetokenizeRequest
    ),
    ("GET", "/tokenizer_info"): RouteDescription(
        "Describe the tokenizer", "tokens", answers.TokenizerInfo, extra_statuses=(404,)
    ),
    ("POST", "/v1/chat/completions/render"): RouteDescription(
        "Render and tokenize a conversation", "tokens", answers.RenderedRequest, ChatRequest
    ),
    ("POST", "/v1/completions/render"): RouteDescription(
        "Tokenize prompts", "tokens", answers.RenderedCompletion, CompletionRequest
    ),
    ("GET", "/health"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): _HEALTH,
    ("GET", "/version"): RouteDescription("The server's version", "server", answers.Version),
    ("GET", "/load"): RouteDescription("Requests in flight", "server", answers.Load),
    ("GET", "/metrics"): RouteDescription("Metrics in Prometheus' text format", "server"),
}
