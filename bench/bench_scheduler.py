"""Time of a scheduler step (schedule + update) with many decoding sequences.

Sequences stand at random offsets in their blocks, so in each step about one in block_size crosses
a block boundary: its full block is hashed and cached, and blocks are allocated. The result of each
step is prepared beforehand, so nothing but the scheduler is timed. The last line is JSON.

    python bench/bench_scheduler.py [--num-seqs 256] [--num-steps 400] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

from llmserve.config import CacheConfig, SchedulerConfig
from llmserve.core import (
    KVCacheGroup,
    KVCacheSpec,
    Request,
    SamplingParams,
    SeqResult,
    StepResult,
)
from llmserve.kvcache import make_block_pool
from llmserve.scheduler import Scheduler

BLOCK_SIZE = 16
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full attention": (None,),
    "gemma 3 270m": (None, 512, 512, 512, 512, 512),
}


def run_steps(scheduler: Scheduler, num_steps: int) -> tuple[list[float], list[float]]:
    """Times of schedule() and of update(), in microseconds, one per step."""
    schedule_us, update_us = [], []
    for step in range(num_steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        result = StepResult([SeqResult((1000 + step % 7,))] * len(plan.request_ids))
        updating = time.perf_counter()
        scheduler.update(plan, result)
        end = time.perf_counter()
        schedule_us.append((scheduled - begin) * 1e6)
        update_us.append((end - updating) * 1e6)
    return schedule_us, update_us


def measure(
    windows: tuple[int | None, ...], num_seqs: int, num_steps: int
) -> dict[str, float | str]:
    spec = KVCacheSpec(
        tuple(KVCacheGroup((i,), window) for i, window in enumerate(windows)),
        BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=256,
        dtype="float16",
    )
    max_len = 1100 + num_steps
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192),
        CacheConfig(block_size=BLOCK_SIZE),
        spec,
        num_blocks=num_seqs * (max_len // BLOCK_SIZE + 2) * len(windows),
        max_model_len=max_len,
    )
    rng = random.Random(0)
    for i in range(num_seqs):
        prompt = [rng.randrange(32000) for _ in range(rng.randrange(900, 1001))]
        sampling = SamplingParams(max_tokens=10**9, eos_token_ids=(1, 106))
        scheduler.add(Request(f"cmpl-{i:032x}", prompt, sampling, 0.0))
    while run_prefill_step(scheduler) < num_seqs:
        pass
    run_steps(scheduler, 10)
    gc.collect()
    gc.freeze()
    schedule_us, update_us = run_steps(scheduler, num_steps)
    whole_us = [a + b for a, b in zip(schedule_us, update_us, strict=True)]
    return {
        "pool": type(make_block_pool(2)).__name__,
        "num_seqs": num_seqs,
        "num_groups": len(windows),
        "schedule_us_p50": statistics.median(schedule_us),
        "update_us_p50": statistics.median(update_us),
        "step_us_p50": statistics.median(whole_us),
        "step_us_p99": statistics.quantiles(whole_us, n=100)[98],
    }


def run_prefill_step(scheduler: Scheduler) -> int:
    """Runs one step; the number of sequences that sampled in it."""
    plan = scheduler.schedule()
    result = [SeqResult((1000,) if is_sampling else ()) for is_sampling in plan.is_sampling]
    scheduler.update(plan, StepResult(result))
    return sum(plan.is_sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=400)
    args = parser.parse_args()
    results = {}
    for name, windows in WINDOWS.items():
        results[name] = measure(windows, args.num_seqs, args.num_steps)
        print(f"{name}:")
        for key, value in results[name].items():
            print(f"  {key:<16} {value if isinstance(value, str) else format(value, '.0f')}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
