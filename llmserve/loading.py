"""From the settings to a model that is ready for its first step: files, tokenizer, runner.

Prints each phase with its time, and where the memory goes. Knows nothing of the API, whose modules
are imported meanwhile: packing weights leaves the interpreter to others.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llmserve import __version__
from llmserve.config import ServerConfig
from llmserve.errors import StartupError
from llmserve.files.model import ModelFiles, open_model
from llmserve.log import configure_logging
from llmserve.process_memory import map_large_blocks
from llmserve.runner import LoadedRunner, for_device, load_runner
from llmserve.tokenizer import Tokenizer, load_tokenizer


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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that a server needs of a model. `config` names a device that is there."""

    config: ServerConfig
    files: ModelFiles
    tokenizer: Tokenizer
    loaded: LoadedRunner
    phases: Phases


def load_model(config: ServerConfig) -> LoadedModel:
    """Raises StartupError for a model that cannot be served."""
    configure_logging(config.frontend.log_level)
    map_large_blocks()
    phases = Phases()
    config = for_device(config)
    phases.say(f"llmserve {__version__}")
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
    return LoadedModel(config, files, tokenizer, loaded, phases)
