"""POST /tokenize and /detokenize: prompts and conversations as token ids, and back."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from llmserve.api.body import INLINE_BYTES, parse_object, read_body, run_sized
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.fields import check_vocabulary, validate
from llmserve.api.json_response import json_response
from llmserve.api.prompts import encode_conversation
from llmserve.api.schemas import DetokenizeRequest, TokenizeRequest
from llmserve.errors import RequestError


async def tokenize(request: web.Request) -> web.Response:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    size = INLINE_BYTES + 1 if context.config.trust_request_chat_template else len(body)
    return json_response(await run_sized(size, _tokenize, body, context))


async def detokenize(request: web.Request) -> web.Response:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    return json_response(await run_sized(len(body), _detokenize, body, context))


def _tokenize(body: bytes, context: ApiContext) -> dict[str, Any]:
    request = validate(TokenizeRequest, parse_object(body))
    context.resolve_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if request.prompt is not None:
        ids = context.tokenizer.encode(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    else:
        ids = encode_conversation(
            request.messages or [],
            request,
            context,
            add_special_tokens=request.add_special_tokens,
        ).token_ids
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": context.model.max_model_len,
        "tokens": ids,
    }
    if request.return_token_strs:
        answer["token_strs"] = [context.tokenizer.token_str(token_id) for token_id in ids]
    return answer


def _detokenize(body: bytes, context: ApiContext) -> dict[str, Any]:
    request = validate(DetokenizeRequest, parse_object(body))
    context.resolve_model(request.model)
    check_vocabulary(request.tokens, context.model.vocab_size, "tokens")
    return {"prompt": context.tokenizer.decode(request.tokens, skip_special_tokens=False)}
