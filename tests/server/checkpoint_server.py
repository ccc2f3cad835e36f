"""A server in the test's process that runs a real checkpoint: nothing of it is scripted but the
weights (see tests.scripted_checkpoint)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from llmserve.api.app import ModelInfo, make_app
from llmserve.api.runner import ApiRunner
from llmserve.config import CacheConfig, FrontendConfig, ModelConfig, RunnerConfig, ServerConfig
from llmserve.engine import AsyncEngine, Engine, EngineStats
from llmserve.executor import UniprocExecutor
from llmserve.files.model import ModelFiles, open_model
from llmserve.runner import LoadedRunner, load_runner
from llmserve.scheduler import Scheduler
from llmserve.tokenizer import ChatTemplate, Tokenizer, load_chat_template, load_tokenizer

MODEL = "scripted"


class CheckpointServer:
    """A client of the server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer


@contextlib.asynccontextmanager
async def serving_checkpoint(
    folder: Path, *, num_blocks: int = 256, **frontend: Any
) -> AsyncIterator[CheckpointServer]:
    config = ServerConfig(
        model=ModelConfig(model=str(folder)),
        cache=CacheConfig(num_gpu_blocks_override=num_blocks),
        runner=RunnerConfig(threads=1),
        frontend=FrontendConfig(port=0, disable_log_requests=True, **frontend),
    )
    files, tokenizer, loaded, template = await asyncio.to_thread(_load, config)
    stats = EngineStats(model_name=MODEL, max_model_len=loaded.max_model_len)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        loaded.kv_spec,
        num_blocks=loaded.num_blocks,
        max_model_len=loaded.max_model_len,
    )
    executor = UniprocExecutor(loaded.runner)
    engine = AsyncEngine(
        Engine(scheduler, tokenizer, stats, log_requests=False),
        executor,
        stats,
        max_model_len=loaded.max_model_len,
    )
    info = ModelInfo(
        names=(MODEL,),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        generation_config=files.generation_config,
    )
    runner = ApiRunner(make_app(engine, tokenizer, template, config.frontend, info))
    await engine.start()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as session:
            yield CheckpointServer(f"http://{host}:{port}", session)
    finally:
        await runner.cleanup()
        await engine.shutdown()


def _load(config: ServerConfig) -> tuple[ModelFiles, Tokenizer, LoadedRunner, ChatTemplate]:
    files = open_model(config.model, print)
    tokenizer = load_tokenizer(files)
    template = load_chat_template(files, tokenizer, config.frontend, None)
    return files, tokenizer, load_runner(files, config), template
