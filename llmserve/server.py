"""Wires the layers above a loaded model together and runs them until a signal.

SIGTERM and SIGINT begin an orderly end: no new connections, running requests finish until
--shutdown-timeout, the rest are aborted. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket

import uvloop
from aiohttp import web

from llmserve.api.app import ModelInfo, make_app
from llmserve.api.context import CONTEXT
from llmserve.api.runner import ApiRunner
from llmserve.engine import AsyncEngine, Engine, EngineStats
from llmserve.errors import StartupError
from llmserve.executor import UniprocExecutor
from llmserve.loading import LoadedModel
from llmserve.process_memory import settle
from llmserve.scheduler import Scheduler
from llmserve.sd_notify import sd_notify
from llmserve.tokenizer import load_chat_template

logger = logging.getLogger(__name__)


def run(model: LoadedModel, listener: socket.socket) -> int:
    """Serves until a signal; returns the exit code. Raises StartupError."""
    settle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(Server(model).serve(listener))


class Server:
    """The running server: engine coroutine, HTTP application, signals."""

    def __init__(self, model: LoadedModel) -> None:
        self._config = model.config
        self._files = model.files
        self._tokenizer = model.tokenizer
        self._loaded = model.loaded
        self._phases = model.phases
        self._stop = asyncio.Event()
        self._num_signals = 0

    async def serve(self, listener: socket.socket) -> int:
        """Runs until a signal; returns the exit code."""
        engine = self._make_engine()
        runner = ApiRunner(self._make_app(engine))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await engine.start()
        await runner.setup()
        site = web.SockSite(runner, listener)
        try:
            await site.start()
        except OSError as error:
            await engine.shutdown()
            raise StartupError(f"cannot listen: {error.strerror}; choose another --port") from error
        self._announce(listener)
        await self._stop.wait()
        sd_notify("STOPPING=1")
        await site.stop()
        await engine.drain(self._config.frontend.shutdown_timeout)
        await runner.cleanup()
        await engine.shutdown()
        if self._config.frontend.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._config.frontend.uds)
        logger.info("stopped")
        return 0

    def _make_engine(self) -> AsyncEngine:
        config, loaded = self._config, self._loaded
        stats = EngineStats(
            model_name=self._served_names()[0],
            max_model_len=loaded.max_model_len,
            prefix=config.frontend.metrics_prefix,
        )
        stats.describe_cache(
            {
                **dataclasses.asdict(config.cache),
                "cache_dtype": loaded.kv_spec.dtype,
                "num_gpu_blocks": loaded.num_blocks,
            }
        )
        scheduler = Scheduler(
            config.scheduler,
            config.cache,
            loaded.kv_spec,
            num_blocks=loaded.num_blocks,
            max_model_len=loaded.max_model_len,
        )
        engine = Engine(
            scheduler,
            self._tokenizer,
            stats,
            log_requests=not config.frontend.disable_log_requests,
        )
        executor = UniprocExecutor(loaded.runner)
        return AsyncEngine(engine, executor, stats, max_model_len=loaded.max_model_len)

    def _make_app(self, engine: AsyncEngine) -> web.Application:
        template = load_chat_template(
            self._files, self._tokenizer, self._config.frontend, self._config.model.tokenizer
        )
        info = ModelInfo(
            names=self._served_names(),
            max_model_len=self._loaded.max_model_len,
            vocab_size=self._loaded.vocab_size,
            generation_config=self._files.generation_config,
            root=str(self._files.path),
            scheduling_policy=self._config.scheduler.scheduling_policy,
        )
        app = make_app(
            engine,
            self._tokenizer,
            template,
            self._config.frontend,
            info,
            seed=self._config.model.seed,
        )
        if self._config.frontend.prepare_grammars:
            with self._phases.phase("prepare grammars"):
                app[CONTEXT].grammars.warm_up()
        return app

    def _served_names(self) -> tuple[str, ...]:
        return self._config.model.served_model_name or (self._files.name,)

    def _announce(self, listener: socket.socket) -> None:
        if self._config.frontend.uds is not None:
            where = f"unix:{self._config.frontend.uds}"
        else:
            host, port = listener.getsockname()[:2]
            where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        names = ", ".join(self._served_names())
        self._phases.say(f"serving {names} on {where} after {self._phases.total_s:.2f} s")
        sd_notify("READY=1")

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            logger.warning("second signal: ending at once")
            os._exit(128 + number)
        logger.info("%s: finishing running requests, then stopping", number.name)
        self._stop.set()
