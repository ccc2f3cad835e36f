"""Wires the layers together and runs them until a signal: the only module that knows them all.

Start-up prints each phase with its time, and where the memory goes. SIGTERM and SIGINT begin an
orderly end: no new connections, running requests finish until --shutdown-timeout, the rest are
aborted. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvloop
from aiohttp import web

from llmserve import __version__
from llmserve.api.app import ModelInfo, make_app
from llmserve.api.context import CONTEXT
from llmserve.api.runner import ApiRunner
from llmserve.config import FrontendConfig, ServerConfig
from llmserve.engine import AsyncEngine, Engine, EngineStats
from llmserve.errors import StartupError
from llmserve.executor import UniprocExecutor
from llmserve.files.model import ModelFiles, open_model
from llmserve.log import configure_logging
from llmserve.process_memory import map_large_blocks, settle
from llmserve.runner import LoadedRunner, for_device, load_runner
from llmserve.scheduler import Scheduler
from llmserve.sd_notify import sd_notify
from llmserve.tokenizer import Tokenizer, load_chat_template, load_tokenizer

logger = logging.getLogger(__name__)


class Phases:
    """Prints how long each phase of the start took."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.say(f"{name:<28} {time.perf_counter() - begin:6.2f} s")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._start


def run(config: ServerConfig) -> int:
    """Serves until a signal; returns the exit code. Raises StartupError."""
    configure_logging(config.frontend.log_level)
    map_large_blocks()
    phases = Phases()
    config = for_device(config)
    phases.say(f"llmserve {__version__}")
    # Bound before anything is loaded, so that a taken port is known at once.
    listener = bind(config.frontend)
    with phases.phase("open model"):
        files = open_model(config.model, phases.say)
    with ThreadPoolExecutor(1) as pool, phases.phase("load tokenizer and weights"):
        future = pool.submit(load_tokenizer, files, config.model.tokenizer)
        loaded = load_runner(files, config)
        tokenizer = future.result()
    for line in loaded.budget.lines():
        phases.say(line)
    with phases.phase("warm up"):
        try:
            loaded.runner.probe()
        except RuntimeError as error:
            raise StartupError(f"the model does not compute: {error}") from error
    settle()
    server = Server(config, files, tokenizer, loaded, phases)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(server.serve(listener))


def bind(config: FrontendConfig) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartupError naming the address."""
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {config.host} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise StartupError(
                f"{config.host} is no address of this machine; choose another with --host"
            ) from error
        raise StartupError(
            f"port {config.port} on {config.host} is already in use or not allowed "
            f"({error.strerror}); choose another with --port"
        ) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        # Without a number it is Python's own: the path does not fit into a socket's address.
        raise StartupError(f"--uds {path} cannot be used: {error.strerror or error}") from error
    return listener


def _remove_stale_socket(path: str) -> None:
    """Removes a socket that nobody listens on; OSError if somebody does or it is no socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, "another server listens there")


class Server:
    """The running server: engine coroutine, HTTP application, signals."""

    def __init__(
        self,
        config: ServerConfig,
        files: ModelFiles,
        tokenizer: Tokenizer,
        loaded: LoadedRunner,
        phases: Phases,
    ) -> None:
        self._config = config
        self._files = files
        self._tokenizer = tokenizer
        self._loaded = loaded
        self._phases = phases
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
