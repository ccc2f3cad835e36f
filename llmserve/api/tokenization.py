"""/tokenize, /detokenize and /tokenizer_info: prompts and conversations as token ids, and back.

A text of any length is tokenized, unlike a prompt that must fit into the context. A long one goes
through in pieces, so that neither its tokens nor its answer ever are one large object.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from llmserve.api.body import parse_object, read_body
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.fields import check_vocabulary, validate
from llmserve.api.json_response import json_response
from llmserve.api.preparation import ignored_header, refuse_ignored
from llmserve.api.prompts import render, run_preparation
from llmserve.api.schemas import (
    DetokenizeRequest,
    TemplateFields,
    TokenizeRequest,
    ignored_fields,
)
from llmserve.errors import RequestError
from llmserve.tokenizer import Tokenizer, encode_chat

_LONG_CHARS = 1 << 18
_PIECE_BYTES = 1 << 18  # of an answer that is sent at once


async def tokenize(request: web.Request) -> web.Response:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    has_left = threading.Event()
    try:
        tokens = await run_preparation(
            context, len(body), lambda context: _tokenize(body, context, has_left)
        )
    finally:
        has_left.set()
    return tokens.response(context.model.max_model_len)


async def detokenize(request: web.Request) -> web.Response:
    """Handler."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    return await run_preparation(context, len(body), lambda context: _detokenize(body, context))


async def tokenizer_info(request: web.Request) -> web.Response:
    """Handler: what tokenizer_config.json says of a tokenizer, whatever file it came from."""
    context = request.app[CONTEXT]
    if not context.config.enable_tokenizer_info_endpoint:
        raise RequestError(
            "GET /tokenizer_info needs a server with --enable-tokenizer-info-endpoint", status=404
        )
    return json_response(await asyncio.to_thread(_describe_tokenizer, context))


@dataclass(slots=True)
class _Tokens:
    """A tokenized text, as pieces of JSON."""

    count: int = 0
    ids: list[bytes] = field(default_factory=list)
    strings: list[bytes] | None = None  # None: they were not asked for
    ignored: list[str] = field(default_factory=list)  # fields of the request without effect

    def add(self, ids: list[int], tokenizer: Tokenizer) -> None:
        if not ids:
            return
        self.count += len(ids)
        self.ids.append(orjson.dumps(ids)[1:-1])
        if self.strings is not None:
            self.strings.append(orjson.dumps([tokenizer.token_str(i) for i in ids])[1:-1])

    def response(self, max_model_len: int) -> web.Response:
        head = orjson.dumps({"count": self.count, "max_model_len": max_model_len})[:-1]
        parts = [head, b',"tokens":[', *_separated(self.ids), b"]"]
        if self.strings is not None:
            parts += [b',"token_strs":[', *_separated(self.strings), b"]"]
        parts.append(b"}")
        size = sum(map(len, parts))
        body = b"".join(parts) if size <= _PIECE_BYTES else _sent_in_turn(parts)
        headers = ignored_header(self.ignored)
        return web.Response(body=body, content_type="application/json", headers=headers)


def _separated(pieces: list[bytes]) -> Iterator[bytes]:
    for position, piece in enumerate(pieces):
        if position:
            yield b","
        yield piece


async def _sent_in_turn(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    waiting = bytearray()
    for part in parts:
        waiting += part
        if len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _tokenize(body: bytes, context: ApiContext, has_left: threading.Event) -> _Tokens:
    fields = parse_object(body)
    request = validate(TokenizeRequest, fields)
    context.resolve_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    ignored = set(ignored_fields(TokenizeRequest, fields))
    if request.messages is None:
        ignored |= TemplateFields.model_fields.keys() & {k for k in fields if fields[k] is not None}
    refuse_ignored(sorted(ignored), context)
    tokens = _Tokens(strings=[] if request.return_token_strs else None, ignored=sorted(ignored))
    for ids in _encode(request, context):
        if has_left.is_set():
            raise RequestError("the client has gone", status=499)
        tokens.add(ids, context.tokenizer)
    return tokens


def _encode(request: TokenizeRequest, context: ApiContext) -> Iterable[list[int]]:
    """The token ids, in one or in many pieces."""
    add_special_tokens = request.add_special_tokens is not False
    is_chat = request.messages is not None
    text = render(request.messages or [], request, context) if is_chat else request.prompt or ""
    if len(text) > _LONG_CHARS:
        if is_chat and add_special_tokens:
            return context.long_texts.encode_chat(text)
        return context.long_texts.encode(text, add_special_tokens=add_special_tokens)
    if is_chat and add_special_tokens:
        return [encode_chat(context.tokenizer, text)]
    return [context.tokenizer.encode(text, add_special_tokens=add_special_tokens)]


def _detokenize(body: bytes, context: ApiContext) -> web.Response:
    fields = parse_object(body)
    request = validate(DetokenizeRequest, fields)
    ignored = ignored_fields(DetokenizeRequest, fields)
    refuse_ignored(ignored, context)
    context.resolve_model(request.model)
    check_vocabulary(request.tokens, context.model.vocab_size, "tokens")
    prompt = context.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return json_response({"prompt": prompt}, headers=ignored_header(ignored))


def _describe_tokenizer(context: ApiContext) -> dict[str, Any]:
    tokenizer, sources = context.tokenizer, context.chat_template.sources
    named = [{"name": name, "template": source} for name, source in sources.items()]
    is_plain = list(sources) == ["default"]
    special_ids = filter(tokenizer.is_special, range(tokenizer.vocab_size))
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": context.model.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        **tokenizer.special_tokens,
        "added_tokens_decoder": {
            str(token_id): {"content": tokenizer.token_str(token_id), "special": True}
            for token_id in special_ids
        },
        "chat_template": sources["default"] if is_plain else named or None,
    }
