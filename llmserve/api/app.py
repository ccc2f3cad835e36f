"""make_app: the routes and what is around them."""

from __future__ import annotations

import functools
import random

from aiohttp import web

from llmserve.api.anthropic import add_messages_routes
from llmserve.api.chat import create_chat_completion
from llmserve.api.completions import create_completion
from llmserve.api.context import CONTEXT, ApiContext, ModelInfo
from llmserve.api.defaults import SamplingDefaults, eos_token_ids
from llmserve.api.description.pages import add_description_routes
from llmserve.api.health import health, load, metrics, version
from llmserve.api.http_metrics import HttpMetrics
from llmserve.api.middleware import make_auth, make_outer, make_preflight, make_prepare_hook
from llmserve.api.models import get_model, list_models
from llmserve.api.openai_responses import add_responses_routes
from llmserve.api.output_formats import OutputFormats
from llmserve.api.render import render_chat_completion, render_completion
from llmserve.api.tokenization import detokenize, tokenize, tokenizer_info
from llmserve.api.work_gate import WorkGate
from llmserve.config import FrontendConfig
from llmserve.engine import AsyncEngine
from llmserve.grammar import GrammarCompiler
from llmserve.tokenizer import ChatTemplate, ChunkedEncoder, Tokenizer

__all__ = ["ModelInfo", "make_app"]


def make_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    config: FrontendConfig,
    model: ModelInfo,
    *,
    seed: int | None = None,
    body_timeout_s: float = 60.0,
) -> web.Application:
    """The application; it owns no resources. Call once per engine (metrics are registered).

    seed: where the seeds of requests without one come from; None draws them anew in each process.
    """
    app = web.Application(
        client_max_size=config.max_request_bytes,
        middlewares=[
            make_outer(HttpMetrics(engine.stats.registry)),
            make_preflight(config.allowed_origins),
            make_auth(config.api_key),
        ],
    )
    app[CONTEXT] = ApiContext(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=chat_template,
        config=config,
        model=model,
        defaults=SamplingDefaults.from_generation_config(model.generation_config),
        formats=OutputFormats(config, tokenizer, chat_template.sources),
        seeds=random.SystemRandom() if seed is None else random.Random(seed),
        longest_token=functools.cache(lambda: _longest_token(tokenizer)),
        grammars=GrammarCompiler(
            tokenizer,
            model.vocab_size,
            eos_token_ids(tuple(tokenizer.eos_token_ids), model.generation_config),
        ),
        gate=WorkGate(),
        long_texts=ChunkedEncoder(tokenizer),
        body_timeout_s=body_timeout_s,
    )
    app.on_cleanup.append(_close_gate)
    app.on_response_prepare.append(make_prepare_hook(config.allowed_origins))
    app.add_routes(
        [
            web.post("/v1/chat/completions", create_chat_completion),
            web.post("/v1/completions", create_completion),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{id:.+}", get_model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/tokenizer_info", tokenizer_info),
            web.post("/v1/chat/completions/render", render_chat_completion),
            web.post("/v1/completions/render", render_completion),
            web.get("/health", health),
            web.get("/ping", health),
            web.post("/ping", health),
            web.get("/version", version),
            web.get("/load", load),
            web.get("/metrics", metrics),
        ]
    )
    add_responses_routes(app, config.response_store_size, config.response_store_bytes)
    add_messages_routes(app)
    if not config.disable_fastapi_docs:
        add_description_routes(app)
    return app


def _longest_token(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))


async def _close_gate(app: web.Application) -> None:
    app[CONTEXT].gate.close()
    app[CONTEXT].grammars.close()
