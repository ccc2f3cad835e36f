"""A scheduler and the CUDA runner over dummy weights, with a clock on every part of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu.device import Device
from bench.gpu.shapes import Load
from llmserve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from llmserve.core import PendingStep, Request, SamplingParams, StepPlan
from llmserve.files.model import open_model
from llmserve.models import read_model
from llmserve.runner.cuda_graphs import Recorder
from llmserve.runner.cuda_load import DeviceMemory, load_cuda_runner
from llmserve.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step that has ended. host_s: scheduling, launching and reading it, without waiting."""

    num_seqs: int
    num_tokens: int
    num_keys: int  # that its sequences have, all together
    host_s: float
    ended_at: float


class Engine:
    """Runs requests to their end, with two steps in flight. `phases`: seconds of the start-up."""

    def __init__(self, folder: Path, device: Device, load: Load, dtype: str) -> None:
        """folder: of config.json."""
        config = ServerConfig(
            model=ModelConfig(
                model=str(folder),
                load_format="dummy",
                dtype=dtype,
                seed=0,
                max_model_len=load.max_model_len,
            ),
            # Prompts are all different; each is to be computed.
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(
                max_num_seqs=load.max_num_seqs,
                max_num_batched_tokens=load.token_budget,
                async_scheduling=True,
            ),
        )
        begin = time.perf_counter()
        files = open_model(config.model, lambda line: None)
        model, weights = read_model(
            files, dtype=dtype, load_format="dummy", seed=0, device=device.torch_device.type
        )
        kernels = device.kernels_of(getattr(torch, dtype))
        memory = _TimedMemory(device.memory)
        self.recorder = TimedRecorder(device.recorder, device.synchronize)
        self.runner, plan = load_cuda_runner(model, weights, config, kernels, memory, self.recorder)
        device.synchronize()
        loaded_at = time.perf_counter()
        self.runner.probe()
        self.phases = {
            "weights": memory.began_at - begin,
            "largest steps": memory.ended_at - memory.began_at,
            "KV cache": loaded_at - memory.ended_at,
            "probe": time.perf_counter() - loaded_at,
        }
        self._scheduler = Scheduler(
            config.scheduler,
            config.cache,
            plan.kv_spec,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
        )
        self._vocab_size = model.vocab_size
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    def run(self, num_prompts: int, prompt_len: int, num_tokens: int) -> list[StepTime]:
        """Random prompts of one length, each with so many tokens of output, all at once."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        for _ in range(num_prompts):
            self._num_requests += 1
            prompt = self._rng.integers(3, self._vocab_size, prompt_len).tolist()
            now = time.monotonic()
            self._scheduler.add(Request(str(self._num_requests), prompt, params, now))
        times: list[StepTime] = []
        steps: deque[tuple[StepPlan, PendingStep, float]] = deque()
        while self._scheduler.has_work or steps:
            while len(steps) < self._scheduler.max_steps_in_flight:
                begin = time.perf_counter()
                plan = self._scheduler.schedule()
                if plan.is_empty:
                    break
                pending = self.runner.launch(plan)
                steps.append((plan, pending, time.perf_counter() - begin))
            if steps:
                times.append(self._end_step(*steps.popleft()))
        return times

    def _end_step(self, plan: StepPlan, step: PendingStep, launch_s: float) -> StepTime:
        while not step.is_done:
            pass  # a wait that gives the processor away would count as host time
        begin = time.perf_counter()
        for event in self._scheduler.update(plan, step.wait()):
            if event.error is not None:
                raise RuntimeError(f"request {event.request_id}: {event.error}")
        end = time.perf_counter()
        return StepTime(
            num_seqs=len(plan.request_ids),
            num_tokens=plan.total_num_scheduled_tokens,
            num_keys=sum(plan.num_computed_tokens) + plan.total_num_scheduled_tokens,
            host_s=launch_s + end - begin,
            ended_at=end,
        )


class TimedRecorder:
    """A recorder that adds up how long graphs take to record. One in pieces counts as one graph."""

    def __init__(self, recorder: Recorder, synchronize: Callable[[], None]) -> None:
        self.num_graphs = 0
        self.seconds = 0.0
        self._recorder = recorder
        self._synchronize = synchronize

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        with self._timing():
            return self._recorder.record(body)

    def record_pieces(self, body: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        with self._timing():
            return self._recorder.record_pieces(body)

    @contextmanager
    def _timing(self) -> Iterator[None]:
        self._synchronize()  # the step before is not part of it
        begin = time.perf_counter()
        yield
        self._synchronize()
        self.seconds += time.perf_counter() - begin
        self.num_graphs += 1


class _TimedMemory:
    """The device's memory; tells when the largest steps are measured, which is when weights are
    there."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.began_at = self.ended_at = 0.0

    @property
    def total(self) -> int:
        return self._memory.total

    @property
    def free(self) -> int:
        return self._memory.free

    @property
    def allocated(self) -> int:
        return self._memory.allocated

    def peak(self, work: Callable[[], None]) -> int:
        self.began_at = time.perf_counter()
        peak = self._memory.peak(work)
        self.ended_at = time.perf_counter()
        return peak
