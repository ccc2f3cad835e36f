"""Runs chat requests that were translated from other APIs.

Those APIs build the fields of a chat request and read its stream of chunks, whether they stream
themselves or not, so every route generates in one and the same way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from llmserve.api.chat import answer_role, prepare_chat_fields
from llmserve.api.chat_answer import ChatPrepared, stream_chunks
from llmserve.api.context import ApiContext
from llmserve.api.fields import validate
from llmserve.api.preparation import ignored_header, refuse_ignored
from llmserve.api.prompts import encode_conversation
from llmserve.api.schemas import TokenizeRequest
from llmserve.api.sse import Event
from llmserve.api.streams import Streams
from llmserve.errors import RequestError

# Fields of chat that the other APIs lack and that mean the same there.
PASSED_FIELDS = frozenset(
    {
        *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
        *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
        *("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "guided_whitespace_pattern",
        *("skip_special_tokens", "spaces_between_special_tokens"),
        *("chat_template", "chat_template_kwargs", "documents", "add_special_tokens"),
        *("truncate_prompt_tokens", "truncation_side", "thinking_token_budget"),
        *("priority", "cache_salt", "request_id"),
    }
)


def prepare_translated(
    fields: dict[str, Any],
    context: ApiContext,
    request_id: str,
    *,
    names: Mapping[str, str],
    ignored: Iterable[str],
) -> ChatPrepared:
    """Checks the fields of a chat request. Raises RequestError.

    names: what the caller's API calls the fields, for the message of the error.
    ignored: fields of the caller's API that have no effect.
    """
    without_effect = sorted(set(ignored))
    refuse_ignored(without_effect, context)
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    try:
        prepared = prepare_chat_fields(streamed, context, request_id)
    except RequestError as error:
        raise _renamed(error, names) from None
    all_ignored = {*without_effect, *(names.get(name, name) for name in prepared.ignored)}
    return dataclasses.replace(prepared, ignored=sorted(all_ignored))


def passed_fields(sent: dict[str, Any]) -> dict[str, Any]:
    """What a body has of PASSED_FIELDS."""
    return {k: v for k, v in sent.items() if k in PASSED_FIELDS and v is not None}


def refuse_chat_names(
    sent: dict[str, Any], model: type[BaseModel], names: Mapping[str, str]
) -> None:
    """Refuses fields of chat that the caller's API calls otherwise: without them the answer would
    not be what was asked for. Raises RequestError.

    model: the caller's own fields.
    """
    for name, own_name in names.items():
        if sent.get(name) is None or name in model.model_fields or name in PASSED_FIELDS:
            continue
        raise RequestError(f"{name} is called {own_name} in this API; use that", param=name)


def note_beside_prompt(
    sent: dict[str, Any], model: type[BaseModel], context: ApiContext
) -> dict[str, str]:
    """The header that names what a request to count tokens has besides the prompt's fields.

    model: the caller's own fields. With --strict-params RequestError names the first.
    """
    of_prompt = model.model_fields.keys() | (PASSED_FIELDS & TokenizeRequest.model_fields.keys())
    names = sorted(k for k, v in sent.items() if v is not None and k not in of_prompt)
    refuse_ignored(names, context)
    return ignored_header(names)


def count_prompt_tokens(
    fields: dict[str, Any], context: ApiContext, names: Mapping[str, str]
) -> int:
    """Tokens of the prompt that the fields of a chat request make. Raises RequestError."""
    of_prompt = {k: v for k, v in fields.items() if k in TokenizeRequest.model_fields}
    try:
        request = validate(TokenizeRequest, of_prompt)
        context.resolve_model(request.model)
        prompt = encode_conversation(
            request.messages or [],
            request,
            context,
            add_special_tokens=request.add_special_tokens,
        )
    except RequestError as error:
        raise _renamed(error, names) from None
    return len(prompt.token_ids)


class ChatRun:
    """A chat request that has begun. The owner calls `abort` in a `finally`."""

    def __init__(self, prepared: ChatPrepared, context: ApiContext) -> None:
        self.prepared = prepared
        self._context = context
        self._streams = Streams(context.engine, prepared.generations)

    def chunks(self) -> AsyncGenerator[list[Event], None]:
        """The chunks of the streamed answer, the last one with the usage. Raises EngineError."""
        role = answer_role(self.prepared.request, self._context)
        return stream_chunks(self.prepared, self._streams, role)

    def abort(self) -> None:
        """Ends the generation if it runs; idempotent. `chunks` ends without a finish_reason."""
        self._streams.abort()


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error in the words of the caller's API, where functions are written flat."""
    if ".function." in (error.param or ""):
        error = RequestError(
            error.message.replace(".function.", "."),
            param=(error.param or "").replace(".function.", "."),
            code=error.code,
            status=error.status,
        )
    field = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    new = names.get(field)
    if new is None or error.param is None:
        return error
    message = re.sub(rf"\b{re.escape(field)}\b", new, error.message)
    param = new + error.param[len(field) :]
    return RequestError(message, param=param, code=error.code, status=error.status)
