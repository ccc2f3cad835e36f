"""Times sampling and log-probabilities: microseconds per row, kernels and whole sampler.

Rows are "zipf" (probabilities fall with the power 1.5 of the rank, as those of a language model
roughly do) or "normal" (logits of standard deviation 3: a nucleus of tens of thousands of tokens,
the worst case for top-p). Every case is checked against the numpy reference before it is timed.
The last line is JSON. Usage: python -m bench.bench_sampling [--rows 4] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llmserve.core import SamplingParams
from llmserve.kernels import (
    HAS_EXT,
    SAMPLING_ROW,
    CPUKernels,
    logprob_rows,
    reference_sampling,
    sample_rows,
    set_num_threads,
)
from llmserve.runner.sampler import Sampler

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy, logprobs 5": {"temperature": 0.0, "num_logprobs": 5},
    "top_k 50, all penalties": {
        "top_k": 50,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
    },
}


def make_logits(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    if kind == "normal":
        return torch.from_numpy(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    ranked = -1.5 * np.log(np.arange(1, vocab_size + 1))
    rows = np.stack([rng.permutation(ranked) for _ in range(num_rows)])
    return torch.from_numpy(rows.astype(np.float32))


def make_params(num_rows: int, values: dict[str, Any]) -> np.ndarray:
    params = np.zeros(num_rows, SAMPLING_ROW)
    params["temperature"], params["top_p"] = 1.0, 1.0
    for name, value in values.items():
        if name in (SAMPLING_ROW.names or ()):
            params[name] = value
    params["seed"] = np.arange(num_rows)
    return params


def check(logits: torch.Tensor, params: np.ndarray) -> None:
    """Tokens equal the reference's (one in a thousand may sit on a rounding), logprobs too."""
    num_rows = min(len(logits), 4)
    expected = reference_sampling.sample_rows(logits[:num_rows], params[:num_rows])["token_id"]
    got = sample_rows(logits, params)["token_id"][:num_rows].copy()
    row_ids = np.arange(num_rows, dtype=np.int32)
    near = logprob_rows(logits, row_ids, got, 5)
    exact = reference_sampling.logprob_rows(logits, row_ids, got, 5)
    if (got != expected).sum() > 1 or (near.ranks != exact.ranks).any():
        raise SystemExit(f"wrong tokens: {got.tolist()}, expected {expected.tolist()}")
    np.testing.assert_allclose(near.top_logprobs, exact.top_logprobs, rtol=0, atol=1e-6)


def best_us_per_row(run: Callable[[], object], num_rows: int, repeats: int = 7) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best / num_rows * 1e6


def time_case(logits: torch.Tensor, values: dict[str, Any]) -> tuple[float, float]:
    """Microseconds per row of the kernel alone and of Sampler.sample, which calls it."""
    num_rows = len(logits)
    params = make_params(num_rows, values)
    check(logits, params)
    kernel_us = best_us_per_row(lambda: sample_rows(logits, params), num_rows)
    sampler = Sampler(CPUKernels())
    request_ids = [str(i) for i in range(num_rows)]
    for i, request_id in enumerate(request_ids):
        sampler.add(request_id, SamplingParams(seed=i, **values), list(range(500)), [])
    sampler_us = best_us_per_row(lambda: sampler.sample(logits, request_ids), num_rows)
    return kernel_us, sampler_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    set_num_threads(args.threads)
    results: dict[str, float] = {}
    print(f"{'vocabulary':>10}  {'rows':6}  {'case':25}  {'kernel us/row':>13}  sampler us/row")
    for vocab_size in (32_000, 262_144):
        for kind in ("zipf", "normal"):
            logits = make_logits(kind, args.rows, vocab_size)
            for name, values in CASES.items():
                kernel_us, sampler_us = time_case(logits.clone(), values)
                print(
                    f"{vocab_size:10}  {kind:6}  {name:25}  {kernel_us:13.1f}  {sampler_us:14.1f}"
                )
                results[f"{vocab_size}/{kind}/{name}"] = round(sampler_us, 1)
    print(json.dumps({"ext": HAS_EXT, "us_per_row": results, **vars(args)}))


if __name__ == "__main__":
    main()
