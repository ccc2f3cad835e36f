"""POST /v1/chat/completions/render and /v1/completions/render: what a request makes of its prompt.

The request is checked and prepared as for a generation, but nothing is generated. The answer has
vLLM's shape (its disaggregated generate request) with the prompt's text added.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import orjson
from aiohttp import web

from llmserve.api.body import read_body
from llmserve.api.chat import prepare_chat
from llmserve.api.completions import prepare_completion
from llmserve.api.context import CONTEXT, ApiContext
from llmserve.api.middleware import REQUEST_ID
from llmserve.api.preparation import Prepared
from llmserve.api.prompts import Prompt, run_preparation
from llmserve.api.schemas import GenerationFields
from llmserve.core import GenerationRequest, SamplingParams
from llmserve.tokenizer import Tokenizer

_R = TypeVar("_R", bound=GenerationFields)

# Sampling parameters that are called the same here, in requests and in vLLM.
_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "min_tokens", "allowed_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
)


async def render_chat_completion(request: web.Request) -> web.Response:
    """Handler."""
    body, request_id = await read_body(request), request[REQUEST_ID]

    def work(context: ApiContext) -> web.Response:
        prepared = prepare_chat(body, context, request_id)
        return _response(_rendered(prepared, context)[0], prepared)

    return await run_preparation(request.app[CONTEXT], len(body), work)


async def render_completion(request: web.Request) -> web.Response:
    """Handler."""
    body, request_id = await read_body(request), request[REQUEST_ID]

    def work(context: ApiContext) -> web.Response:
        prepared = prepare_completion(body, context, request_id)
        return _response(_rendered(prepared, context), prepared)

    return await run_preparation(request.app[CONTEXT], len(body), work)


def _response(answer: Any, prepared: Prepared[_R]) -> web.Response:
    return web.Response(
        body=orjson.dumps(answer), content_type="application/json", headers=prepared.headers
    )


def _rendered(prepared: Prepared[_R], context: ApiContext) -> list[dict[str, Any]]:
    """One generate request per prompt; those of a request for no tokens have no parameters."""
    pairs = itertools.zip_longest(prepared.prompts, prepared.generations)
    return [_one(prepared, prompt, made, context.tokenizer) for prompt, made in pairs]


def _one(
    prepared: Prepared[_R],
    prompt: Prompt,
    generation: GenerationRequest | None,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    request = prepared.request
    text = prompt.text
    if text is None:
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    return {
        "request_id": prepared.response_id if generation is None else generation.request_id,
        "model": prepared.model,
        "prompt": text,
        "token_ids": prompt.token_ids,
        "sampling_params": _sampling(request, generation.sampling) if generation else None,
        "stream": request.stream,
        "stream_options": request.stream_options and request.stream_options.model_dump(),
        "cache_salt": request.cache_salt,
        "priority": request.priority,
    }


def _sampling(request: GenerationFields, sampling: SamplingParams) -> dict[str, Any]:
    return {
        **{name: getattr(sampling, name) for name in _SAME_NAMES},
        "n": request.n,
        "seed": request.seed,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": request.ignore_eos,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias} or None,
        "bad_words": request.bad_words,
        "logprobs": sampling.num_logprobs,
        "prompt_logprobs": sampling.num_prompt_logprobs,
    }
