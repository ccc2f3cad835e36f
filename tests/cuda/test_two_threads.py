"""Steps launched by one thread and awaited by another, as the server does it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from llmserve.core import Request, SamplingParams, StepPlan, StepResult
from llmserve.engine.step_threads import StepThreads
from llmserve.executor import UniprocExecutor
from llmserve.files.model import open_model
from llmserve.kernels.cuda.kernels import CUDAKernels
from llmserve.models import read_model
from llmserve.runner.cuda_load import load_cuda_runner
from llmserve.runner.cuda_runner import CUDARunner
from llmserve.scheduler import Scheduler
from tests.cuda.cuda_engine import ReplayingRecorder

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
PROMPTS = [[5, 9], [30 + i for i in range(21)], [7] * 5, [80, 3, 60]]
NUM_TOKENS = 7


class Memory:
    """Enough for the model."""

    total = free = 64 << 20
    allocated = 0

    def peak(self, work: Callable[[], None]) -> int:
        work()
        return 0


class Served:
    """A model of random weights with at most three sequences in a step, two steps in flight."""

    def __init__(
        self, folder: Path, module: Any, device: torch.device, recorder: ReplayingRecorder | None
    ) -> None:
        (folder / "config.json").write_text(json.dumps(MODEL))
        self._config = ServerConfig(
            model=ModelConfig(model=str(folder), load_format="dummy", dtype="float32", seed=1),
            cache=CacheConfig(enable_prefix_caching=False, num_gpu_blocks_override=40),
            scheduler=SchedulerConfig(
                max_num_seqs=3, max_num_batched_tokens=16, async_scheduling=True
            ),
        )
        files = open_model(self._config.model, lambda line: None)
        model, weights = read_model(files, dtype="float32", load_format="dummy", seed=1)
        kernels = CUDAKernels(module, device, torch.float32)
        self.runner, self._plan = load_cuda_runner(
            model, weights, self._config, kernels, Memory(), recorder
        )

    def schedule(self) -> Scheduler:
        """A scheduler that has the prompts, whose ids are their numbers."""
        scheduler = Scheduler(
            self._config.scheduler,
            self._config.cache,
            self._plan.kv_spec,
            num_blocks=self._plan.num_blocks,
            max_model_len=self._plan.max_model_len,
        )
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        for number, prompt in enumerate(PROMPTS):
            scheduler.add(Request(str(number), prompt, params, 0.0))
        return scheduler


async def generate(scheduler: Scheduler, threads: StepThreads) -> list[list[int]]:
    """The tokens of each prompt."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    steps: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
    while scheduler.has_work or steps:
        while len(steps) < scheduler.max_steps_in_flight:
            plan = scheduler.schedule()
            if plan.is_empty:
                break
            steps.append((plan, threads.submit(plan)))
        plan, result = steps.popleft()
        for event in scheduler.update(plan, await result):
            assert event.error is None, event.error
            tokens[int(event.request_id)] += event.token_ids
    return tokens


def generate_alone(scheduler: Scheduler, runner: CUDARunner) -> list[list[int]]:
    """The same in this thread, one step at a time."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while scheduler.has_work:
        plan = scheduler.schedule()
        for event in scheduler.update(plan, runner.launch(plan).wait()):
            tokens[int(event.request_id)] += event.token_ids
    return tokens


@pytest.mark.parametrize("has_graphs", [False, True])
def test_two_threads_give_the_tokens_of_one(
    tmp_path: Path, cuda_module: Any, device: torch.device, has_graphs: bool
) -> None:
    """Graphs are captured while the other thread waits for the step before."""
    alone = Served(tmp_path, cuda_module, device, None)
    expected = generate_alone(alone.schedule(), alone.runner)
    recorder = ReplayingRecorder(device) if has_graphs else None
    served = Served(tmp_path, cuda_module, device, recorder)
    threads = StepThreads(UniprocExecutor(served.runner))

    async def run_twice() -> list[list[list[int]]]:
        await threads.probe()
        return [await generate(served.schedule(), threads) for _ in range(2)]

    try:
        outputs = asyncio.run(run_twice())
    finally:
        threads.close()

    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(PROMPTS)
    assert outputs == [expected, expected]
    assert recorder is None or recorder.num_replays > 0
