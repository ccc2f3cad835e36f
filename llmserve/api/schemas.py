"""Request bodies as typed objects: each field, its type, its range, what is refused by name.

Null means absent. Unknown fields are tolerated. A field that would change the output and is not
implemented is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema, model_validator

from llmserve.api.fields import (
    INT64_MAX,
    checked,
    id_list,
    integer,
    real,
    refuse,
    refuse_unsupported,
    shorten,
    text_list,
)
from llmserve.api.grammar_fields import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
    unknown_format_keys,
)
from llmserve.api.messages import MAX_NAME_CHARS, check_messages, check_tools
from llmserve.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_CACHE_SALT_CHARS = 128
MAX_N = 128

# Fields that clients also send in chat_template_kwargs.
_FIELD_VARIABLES = frozenset({"add_generation_prompt", "continue_final_message", "documents"})

# Accepted because clients send them; they change nothing here.
NO_EFFECT_FIELDS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("verbosity", "prediction", "modalities", "web_search_options"),
    }
)


def _stop(value: object, field: str) -> tuple[str, ...]:
    if isinstance(value, str):
        if not value:
            refuse(field, value, "a string that is not empty")
        return (value,)
    if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS:
        refuse(field, value, f"a string or a list of up to {MAX_STOP_STRINGS} strings")
    return tuple(text_list(value, field))


def _logit_bias(value: object, field: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        refuse(field, value, "an object of token ids and numbers from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,18}", key):
            raise RequestError(
                f"{field} has the key {shorten(key)}; its keys must be token ids", param=field
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 100:
            refuse(f"{field}[{key}]", bias, "a number from -100 to 100")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _bad_words(value: object, field: str) -> tuple[str, ...]:
    return tuple(text_list(value, field))


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(field, value, "an object")
    return value


def _documents(value: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        refuse(field, value, "a list of objects")
    for position, document in enumerate(value):
        _object(document, f"{field}[{position}]")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        refuse(field, value, "a string")
    return value


def _no_budget(value: object, field: str) -> None:
    refuse_unsupported(field, "completions do not tell thinking from text; leave it out")


def _best_of_one(value: object, field: str) -> None:
    if value != 1 or isinstance(value, bool):
        refuse_unsupported(field, "chat takes 1 only; use n")


def _echo_off(value: object, field: str) -> None:
    if value is not False:
        refuse_unsupported(field, "chat takes false only")


def _refused(value: object, field: str) -> None:
    if value not in ("", [], {}):
        refuse_unsupported(field, "leave it out")


def _modalities(value: object, field: str) -> None:
    if value != ["text"]:
        refuse_unsupported(field, "this server writes text only")


def _cache_salt(value: object, field: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CACHE_SALT_CHARS:
        refuse(field, value, f"a string of 1 to {MAX_CACHE_SALT_CHARS} characters")
    return value


def _request_id(value: object, field: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,128}", value):
        refuse(field, value, "a string of 1 to 128 visible ASCII characters")
    return value


_SALT = {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS}
_REQUEST_ID = {"type": "string", "pattern": "^[!-~]{1,128}$"}
_ID_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS = {"type": "array", "items": {"type": "string", "minLength": 1}}
STOP_SCHEMA = {
    "anyOf": [{"type": "string", "minLength": 1}, {**_STRINGS, "maxItems": MAX_STOP_STRINGS}]
}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {**_ID_LIST, "minItems": 1},
        {"type": "array", "minItems": 1, "items": {**_ID_LIST, "minItems": 1}},
    ]
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string", "minLength": 1}},
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_TOOL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}

Refused = Annotated[None, checked(_refused, {"enum": ["", [], {}]})]
TokenIds = Annotated[list[int], checked(id_list, _ID_LIST)]
MaxTokens = Annotated[int, integer(1)]
# -1 stands for the whole vocabulary; --max-logprobs is applied later.
Logprobs = Annotated[int, integer(-1, requirement="an integer of at least 0, or -1 for all")]


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """Fields that completions and chat share."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, real(0, 2)] | None = None
    top_p: Annotated[float, real(0, 1, is_low_excluded=True)] | None = None
    top_k: Annotated[int, integer(-1, requirement="-1 or 0 (off) or a positive integer")] | None = (
        None
    )
    min_p: Annotated[float, real(0, 1)] | None = None
    presence_penalty: Annotated[float, real(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, real(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, real(0.001, 1000)] | None = None
    seed: Annotated[int, integer(-INT64_MAX - 1, requirement="a 64-bit integer")] | None = None
    stop: Annotated[tuple[str, ...], checked(_stop, STOP_SCHEMA)] = ()
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, integer(0)] = 0
    include_stop_str_in_output: bool = False
    n: Annotated[int, integer(1, MAX_N)] = 1
    use_beam_search: bool = False
    length_penalty: Annotated[float, real(-10, 10)] | None = None  # default: 1
    prompt_logprobs: Logprobs | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], checked(_logit_bias, _BIASES)] = ()
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[tuple[str, ...], checked(_bad_words, _STRINGS)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: (
        Annotated[int, integer(-1, requirement="-1 (as many as fit) or a positive integer")] | None
    ) = None
    truncation_side: Literal["left", "right"] = "left"
    priority: Annotated[int, integer(-INT64_MAX - 1, requirement="a 64-bit integer")] = 0
    cache_salt: Annotated[str, checked(_cache_salt, _SALT)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: Annotated[str, checked(_request_id, _REQUEST_ID)] | None = None

    # What the output must be; None: any text.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GuidedJson | None = None
    guided_regex: GuidedRegex | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GuidedGrammar | None = None
    guided_whitespace_pattern: str | None = None
    logits_processors: Refused = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    max_tokens: Annotated[int, integer(0)] | None = None
    logprobs: Logprobs | None = None
    echo: bool = False
    best_of: Annotated[int, integer(1, MAX_N)] | None = None
    thinking_token_budget: Annotated[None, checked(_no_budget, {"type": "null"})] = None
    suffix: Annotated[str, checked(_text)] | None = None
    prompt_embeds: Refused = None
    add_special_tokens: bool = True


class TemplateFields(BaseModel):
    """Fields that decide how a conversation becomes a prompt: chat and tokenize."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    add_generation_prompt: bool | None = None  # default: unless continue_final_message
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], checked(_object)] = {}
    documents: Annotated[list[dict[str, Any]], checked(_documents)] | None = None
    tools: Annotated[
        list[dict[str, Any]], checked(check_tools, {"type": "array", "items": _TOOL})
    ] = []
    reasoning_effort: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _move_fields(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Variables of the template that are fields become these, unless the body has them."""
        variables = body.get("chat_template_kwargs")
        if not isinstance(variables, dict):
            return body
        moved = {k: v for k, v in variables.items() if k in _FIELD_VARIABLES and v is not None}
        left = {k: v for k, v in variables.items() if k not in _FIELD_VARIABLES}
        return {**moved, **body, "chat_template_kwargs": left}


class ChatRequest(GenerationFields, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], checked(check_messages, _MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, integer(0)] | None = None
    add_special_tokens: bool | None = None  # default: a BOS, unless the template has one
    best_of: Annotated[None, checked(_best_of_one, {"const": 1})] = None
    echo: Annotated[None, checked(_echo_off, {"const": False})] = None
    suffix: Refused = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    modalities: Annotated[None, checked(_modalities, {"const": ["text"]})] = None
    web_search_options: Refused = None


class TokenizeRequest(TemplateFields):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], checked(check_messages, _MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # default: as the model expects
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    tokens: TokenIds


def ignored_fields(model: type[BaseModel], body: dict[str, Any]) -> list[str]:
    """Names in `body` that never have an effect here, unknown ones among them; sorted."""
    names = {
        name
        for name, value in body.items()
        if value is not None and (name in NO_EFFECT_FIELDS or name not in model.model_fields)
    }
    names |= _unknown_keys(body, "stream_options", StreamOptions.model_fields.keys())
    if "response_format" in model.model_fields:
        names |= unknown_format_keys(body.get("response_format"))
    return sorted(names)


def _unknown_keys(body: dict[str, Any], field: str, known: Collection[str]) -> set[str]:
    """Keys of a field's object, with the field before them."""
    given = body.get(field)
    if not isinstance(given, dict):
        return set()
    return {f"{field}.{k}" for k, value in given.items() if value is not None and k not in known}
