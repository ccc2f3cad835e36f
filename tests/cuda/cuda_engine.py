"""A scheduler and the CUDA runner over a checkpoint, emulated where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from llmserve.config import CacheConfig, ModelConfig, SchedulerConfig
from llmserve.core import PendingStep, Request, SamplingParams, StepPlan
from llmserve.files.model import open_model
from llmserve.kernels.cuda.kernels import CUDAKernels
from llmserve.models import build_decoder, load_kv_scales, read_model
from llmserve.runner.cuda_graphs import CUDARecorder, Recorder
from llmserve.runner.cuda_runner import CUDARunner
from llmserve.runner.memory import make_kv_spec
from llmserve.scheduler import Scheduler
from tests.cuda_emulator.recording import Recording
from tests.golden.tiny_engine import Output

MAX_MODEL_LEN = 128
NUM_BLOCKS = 200


class ReplayingRecorder:
    """CUDA graphs, counted; on the CPU, recordings in their place.

    A graph in pieces counts as one graph, and as one replay when its last piece runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.num_replays = 0
        self.num_piecewise_replays = 0
        self._recorder = CUDARecorder() if device.type == "cuda" else None

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        self.num_graphs += 1
        if self._recorder is None:
            body()
            run = body
        else:
            run = self._recorder.record(body)

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay

    def record_pieces(self, body: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        self.num_graphs += 1
        if self._recorder is None:
            body(lambda: None)
            recording = Recording()
            with recording.noting():
                body(recording.end_piece)
            *pieces, last = recording.replays()
        else:
            *pieces, last = self._recorder.record_pieces(body)

        def replay_last() -> None:
            self.num_piecewise_replays += 1
            last()

        return [*pieces, replay_last]


class CUDAEngine:
    """Runs requests to their end, with up to two steps in flight."""

    def __init__(
        self,
        folder: Path,
        module: Any,
        device: torch.device,
        *,
        recorder: Recorder | None = None,
        dtype: str = "float32",
        kv_dtype: str = "float32",
        is_async: bool = True,
        max_num_seqs: int = 6,
        max_num_tokens: int = 64,
        block_size: int = 16,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        config = ModelConfig(model=str(folder), dtype=dtype)
        files = open_model(config, lambda line: None)
        model, weights = read_model(files, dtype=dtype, load_format="auto", seed=0)
        kernels = CUDAKernels(module, device, getattr(torch, dtype))
        decoder = build_decoder(model, weights, MAX_MODEL_LEN, kernels)
        cache = CacheConfig(block_size=block_size)
        spec = make_kv_spec(model, cache, kv_dtype, MAX_MODEL_LEN)
        self.runner = CUDARunner(
            decoder,
            spec,
            num_blocks,
            kernels,
            recorder,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_model_len=MAX_MODEL_LEN,
            kv_scales=load_kv_scales(model, weights, kernels) if kv_dtype == "fp8" else None,
        )
        if recorder is not None:
            self.runner.run_largest_steps()  # buffers get their size before graphs use them
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_tokens,
                async_scheduling=is_async,
            ),
            cache,
            spec,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
        )
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, **sampling: Any
    ) -> list[Output]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens} | sampling)
        outputs: dict[str, Output] = {}
        for prompt in prompts:
            self._num_requests += 1
            request = Request(str(self._num_requests), prompt, params, arrival_time=0.0)
            outputs[request.request_id] = Output()
            self.scheduler.add(request)
        steps: list[tuple[StepPlan, PendingStep]] = []
        while self.scheduler.has_work or steps:
            while len(steps) < self.scheduler.max_steps_in_flight and self.scheduler.has_work:
                plan = self.scheduler.schedule()
                if plan.is_empty:
                    break
                if plan.needs_last_result and steps:
                    steps[-1][1].wait()
                steps.append((plan, self.runner.launch(plan)))
            self._end_step(*steps.pop(0), outputs)
        self.scheduler.check_integrity()
        return list(outputs.values())

    def _end_step(self, plan: StepPlan, step: PendingStep, outputs: dict[str, Output]) -> None:
        for event in self.scheduler.update(plan, step.wait()):
            assert event.error is None, event.error
            output = outputs[event.request_id]
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs
            output.prompt_logprobs += event.prompt_logprobs or []
