"""What every handler needs, in one typed place of the application."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from llmserve.api.defaults import SamplingDefaults, eos_token_ids
from llmserve.api.output_formats import OutputFormats
from llmserve.api.work_gate import WorkGate
from llmserve.config import FrontendConfig
from llmserve.engine import AsyncEngine
from llmserve.errors import ModelNotFoundError
from llmserve.grammar import GrammarCompiler
from llmserve.tokenizer import ChatTemplate, ChunkedEncoder, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model as clients see it. `names[0]` is the one in answers by default."""

    names: tuple[str, ...]
    max_model_len: int  # tokens, prompt + output
    vocab_size: int  # valid token ids are 0..vocab_size-1
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    root: str | None = None  # where the model came from; default: the first name
    scheduling_policy: str = "fcfs"
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, seconds


@dataclass(frozen=True, slots=True)
class ApiContext:
    """Shared by all handlers; immutable."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    config: FrontendConfig
    model: ModelInfo
    defaults: SamplingDefaults
    formats: OutputFormats
    seeds: random.Random  # of requests without a seed
    longest_token: Callable[[], int]  # bytes; the first call looks at the whole vocabulary
    grammars: GrammarCompiler
    gate: WorkGate
    long_texts: ChunkedEncoder
    body_timeout_s: float = 60.0  # what a client gets to send a head, and then a body

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text."""
        return eos_token_ids(tuple(self.tokenizer.eos_token_ids), self.model.generation_config)

    def draw_seed(self) -> int:
        """A new non-negative 63-bit seed."""
        return self.seeds.getrandbits(63)

    def resolve_model(self, name: str | None) -> str:
        """The name that the answer carries. "" means absent, as in vLLM. ModelNotFoundError."""
        if not name:
            return self.model.names[0]
        if name not in self.model.names:
            raise ModelNotFoundError(
                f"the model {name[:200]!r} does not exist here; this server serves "
                f"{', '.join(self.model.names)}",
                param="model",
            )
        return name


CONTEXT: web.AppKey[ApiContext] = web.AppKey("context", ApiContext)
