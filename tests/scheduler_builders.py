"""A scheduler with a FakeRunner, in small numbers that can be checked by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import (
    KVCacheGroup,
    KVCacheSpec,
    Request,
    SamplingParams,
    StepPlan,
    TokenEvent,
)
from llmserve.scheduler import Scheduler
from tests.fake_runner import FakeRunner, reference_tokens

BLOCK_SIZE = 4


def make_request(
    request_id: str,
    prompt: range | list[int],
    *,
    max_tokens: int = 16,
    min_tokens: int = 0,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    priority: int = 0,
    parent_id: str | None = None,
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=seed,
        eos_token_ids=eos,
        stop_token_ids=stop,
        num_prompt_logprobs=prompt_logprobs,
    )
    return Request(request_id, list(prompt), sampling, 0.0, priority=priority, parent_id=parent_id)


class Loop:
    """schedule -> execute -> update. The scheduler's clock counts 1, 2, 3 ..."""

    def __init__(
        self,
        *,
        windows: tuple[int | None, ...] = (None,),
        num_blocks: int = 32,
        max_model_len: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        async_scheduling: bool = False,
        script: list[int] | None = None,
        fails: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        groups = tuple(KVCacheGroup((i,), window) for i, window in enumerate(windows))
        spec = KVCacheSpec(groups, BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")
        self.windows = windows
        self.runner = FakeRunner(spec, num_blocks, script=script, fails=fails)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=long_prefill_token_threshold,
                scheduling_policy=scheduling_policy,
                async_scheduling=async_scheduling,
            ),
            CacheConfig(block_size=BLOCK_SIZE),
            spec,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            clock=itertools.count(1.0).__next__,
        )
        self.events: list[TokenEvent] = []  # of the last step

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.events = self.scheduler.update(plan, self.runner.execute(plan))
        self.scheduler.check_integrity()
        return plan

    def run(self) -> None:
        """Steps until all is done."""
        while self.scheduler.has_work:
            self.step()

    def check_tokens(self, request: Request) -> None:
        """The request's output is what its prompt alone leads to."""
        output = request.token_ids[request.num_prompt_tokens :]
        assert output == reference_tokens(
            request.prompt_token_ids, request.sampling, len(output), self.windows
        )
