"""Prefill and decode of llmserve without HTTP: what llama-bench is for llama.cpp.

Drives the scheduler and the model runner as the engine does, one sequence at a time, greedily. The
last line is JSON: seconds of every repetition.

    python -m bench.peers.llmserve_worker --model FILE --threads 2
"""

from __future__ import annotations

import argparse
import json
import random
import time

from llmserve.config import (
    CacheConfig,
    FrontendConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from llmserve.core import Request, SamplingParams
from llmserve.files.model import open_model
from llmserve.process_memory import map_large_blocks, settle
from llmserve.runner import LoadedRunner, load_runner
from llmserve.scheduler import Scheduler

_DECODE_PROMPT_LEN = 8


class SingleSequence:
    """Runs one sequence after the other."""

    def __init__(self, loaded: LoadedRunner, config: ServerConfig, seed: int) -> None:
        self._runner = loaded.runner
        self._vocab_size = loaded.vocab_size
        self._random = random.Random(seed)
        self._num_started = 0
        self._scheduler = Scheduler(
            config.scheduler,
            config.cache,
            loaded.kv_spec,
            num_blocks=loaded.num_blocks,
            max_model_len=loaded.max_model_len,
        )

    def seconds(self, prompt_len: int, output_len: int) -> tuple[float, float]:
        """Time to the first token, and from it to the last one."""
        prompt = [self._random.randrange(self._vocab_size) for _ in range(prompt_len)]
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len)
        self._num_started += 1
        self._scheduler.add(Request(f"bench-{self._num_started}", prompt, sampling, 0.0))
        begin = time.perf_counter()
        while not self._step():
            pass
        first = time.perf_counter()
        for _ in range(output_len - 1):
            self._step()
        end = time.perf_counter()
        # The plan that follows releases the sequence's row.
        self._runner.execute(self._scheduler.schedule())
        return first - begin, end - first

    def _step(self) -> bool:
        """Runs a step; True if it gave a token."""
        plan = self._scheduler.schedule()
        return bool(self._scheduler.update(plan, self._runner.execute(plan)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = ServerConfig(
        model=ModelConfig(model=args.model, max_model_len=2048),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(),
        runner=RunnerConfig(threads=args.threads),
        frontend=FrontendConfig(),
    )
    map_large_blocks()
    loaded = load_runner(open_model(config.model, print), config)
    sequence = SingleSequence(loaded, config, args.seed)
    settle()
    sequence.seconds(args.prompt_len, 2)
    prefill_s, decode_s = [], []
    for _ in range(args.repetitions):
        prefill_s.append(sequence.seconds(args.prompt_len, 1)[0])
        decode_s.append(sequence.seconds(_DECODE_PROMPT_LEN, args.output_len + 1)[1])
    print(json.dumps({"prefill_s": prefill_s, "decode_s": decode_s}))


if __name__ == "__main__":
    main()
