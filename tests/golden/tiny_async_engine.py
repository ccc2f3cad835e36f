"""A whole engine over a checkpoint, as the server runs it, with a tokenizer of made-up texts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from aiohttp import web

from llmserve.api.app import ModelInfo, make_app
from llmserve.api.runner import ApiRunner
from llmserve.config import (
    CacheConfig,
    FrontendConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from llmserve.engine import AsyncEngine, Engine, EngineStats
from llmserve.executor import UniprocExecutor
from llmserve.files.model import open_model
from llmserve.runner import load_runner
from llmserve.scheduler import Scheduler
from llmserve.tokenizer import ChatTemplate, StreamDecoder
from tests.make_checkpoints import VOCAB_SIZE


class WordDecoder:
    """Each token is a word of its own."""

    def step(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class WordTokenizer:
    """Implements llmserve.tokenizer.Tokenizer: token 17 is the text "<17>"."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (2,)
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.strip("<>").split("><")] if text else []

    def decode(self, ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        return "".join(f"<{token_id}>" for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_str(token_id).encode()

    def token_str(self, token_id: int) -> str:
        return f"<{token_id}>"

    def is_special(self, token_id: int) -> bool:
        return False

    def stream_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> StreamDecoder:
        return WordDecoder()


@contextlib.asynccontextmanager
async def running_engine(model: Path, **scheduler: Any) -> AsyncIterator[AsyncEngine]:
    """In float32, on two threads."""
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512} | scheduler
    config = ServerConfig(
        model=ModelConfig(model=str(model)),
        cache=CacheConfig(kv_cache_memory_bytes=64 << 20),
        scheduler=SchedulerConfig(**sizes),
        runner=RunnerConfig(threads=2),
    )
    loaded = load_runner(open_model(config.model, lambda line: None), config)
    core = Scheduler(
        config.scheduler,
        config.cache,
        loaded.kv_spec,
        num_blocks=loaded.num_blocks,
        max_model_len=loaded.max_model_len,
    )
    stats = EngineStats(model_name="tiny", max_model_len=loaded.max_model_len)
    inner = Engine(core, WordTokenizer(), stats)
    executor = UniprocExecutor(loaded.runner)
    engine = AsyncEngine(inner, executor, stats, max_model_len=loaded.max_model_len)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


@contextlib.asynccontextmanager
async def serving_checkpoint(
    model: Path, *, scheduler: dict[str, Any] | None = None, **frontend: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server over the checkpoint, which serves it as "tiny"."""
    async with running_engine(model, **(scheduler or {})) as engine:
        info = ModelInfo(names=("tiny",), max_model_len=engine.max_model_len, vocab_size=VOCAB_SIZE)
        config = FrontendConfig(**{"port": 0, **frontend})
        app = make_app(engine, WordTokenizer(), ChatTemplate("{{ messages }}"), config, info)
        runner = ApiRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield session
        await runner.cleanup()
