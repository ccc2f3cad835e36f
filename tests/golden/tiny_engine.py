"""A scheduler and a runner over a checkpoint: generation without tokenizer, engine and server."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig, ServerConfig
from llmserve.core import (
    PendingStep,
    PromptLogprobs,
    Request,
    SamplingParams,
    StepPlan,
    TokenLogprobs,
)
from llmserve.executor import UniprocExecutor
from llmserve.files.model import open_model
from llmserve.runner import load_runner
from llmserve.scheduler import Scheduler


@dataclass
class Output:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = field(default_factory=list)
    num_cached_tokens: int = 0


class TinyEngine:
    """`cache` and `scheduler` are the settings of CacheConfig and SchedulerConfig."""

    def __init__(
        self,
        model: Path | None,
        *,
        cache: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        threads: int | None = None,
        **model_settings: Any,
    ) -> None:
        sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512} | (scheduler or {})
        config = ServerConfig(
            model=ModelConfig(model=None if model is None else str(model), **model_settings),
            cache=CacheConfig(**(cache or {})),
            scheduler=SchedulerConfig(**sizes),
            runner=RunnerConfig(threads=threads),
        )
        self.loaded = load_runner(open_model(config.model, lambda line: None), config)
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            self.loaded.kv_spec,
            num_blocks=self.loaded.num_blocks,
            max_model_len=self.loaded.max_model_len,
        )
        self._executor = UniprocExecutor(self.loaded.runner)
        self._ids = itertools.count()

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int = 64, **sampling: Any
    ) -> list[Output]:
        """Runs all prompts at once, greedily unless `sampling` says otherwise."""
        return self.generate_each(prompts, [_greedy(num_tokens, sampling)] * len(prompts))

    def generate_each(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]
    ) -> list[Output]:
        """Runs all prompts at once, each with parameters of its own."""
        requests = [
            Request(str(next(self._ids)), prompt, params, arrival_time=time.monotonic())
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        return self._run(requests)

    def generate_choices(self, prompt: list[int], n: int, num_tokens: int) -> list[Output]:
        """n greedy choices of one prompt; the later ones fork from the first."""
        params = _greedy(num_tokens, {})
        ids = [str(next(self._ids)) for _ in range(n)]
        requests = [
            Request(
                id, prompt, params, time.monotonic(), parent_id=ids[0] if id != ids[0] else None
            )
            for id in ids
        ]
        return self._run(requests)

    def _run(self, requests: list[Request]) -> list[Output]:
        outputs = {request.request_id: Output() for request in requests}
        for request in requests:
            self.scheduler.add(request)
        steps: deque[tuple[StepPlan, PendingStep]] = deque()
        while self.scheduler.has_work or steps:
            while len(steps) < self.scheduler.max_steps_in_flight:
                plan = self.scheduler.schedule()
                if plan.is_empty:
                    break
                steps.append((plan, self._executor.launch(plan)))
            if steps:
                self._end_step(*steps.popleft(), outputs)
        for request in requests:
            outputs[request.request_id].num_cached_tokens = request.num_cached_tokens
        self.scheduler.check_integrity()
        return list(outputs.values())

    def _end_step(self, plan: StepPlan, step: PendingStep, outputs: dict[str, Output]) -> None:
        for event in self.scheduler.update(plan, step.wait()):
            assert event.error is None, event.error
            output = outputs[event.request_id]
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs
            output.prompt_logprobs += event.prompt_logprobs or []


def _greedy(num_tokens: int, sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens} | sampling)


def make_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids from 3 up, so that none is special."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, size=length).tolist() for length in lengths]
