"""Times products with weights of each storage type, after a check against the reference.

GB/s count the bytes of the weight, once a call; GMAC/s are 10^9 multiply-adds a second. Each time
is the best of several calls, as other load only ever adds. For a matrix that no cache holds, a
plain read of as many bytes is timed beside it. The last line is JSON.

    python bench/bench_linear.py [--threads 2] [--types Q8_0,Q4_K] [--instruction-set avx2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from llmserve import kernels
from llmserve.kernels import GGMLType, Weight, reference

LARGE_ROWS = 262144
# num_rows, num_cols; K-quants need a multiple of 256 columns and get the next one.
SHAPES = [(LARGE_ROWS, 640), (2048, 640), (640, 2048), (3072, 1024)]
NUM_TOKENS = [1, 8, 32, 512]


def random_weight(type: GGMLType, num_rows: int, num_cols: int) -> Weight:
    """Random bytes below 64: as float16, bfloat16 or float32 they are small finite numbers."""
    num_cols = -(-num_cols // type.block_len) * type.block_len
    data = torch.randint(0, 64, (num_rows, type.row_bytes(num_cols)), dtype=torch.uint8)
    return Weight(data, type, num_rows, num_cols)


def check(type: GGMLType) -> None:
    weight = random_weight(type, 64, 512)
    x = torch.randn(40, 512)
    expected = reference.linear(x, weight)
    error = (kernels.linear(x, weight) - expected).abs().max() / expected.abs().max()
    if not error < 0.02:
        raise SystemExit(f"linear is off by {error:.2e} of its range for {type.name}")


def best_seconds(function: Callable[[], object], budget_s: float = 0.25) -> float:
    function()
    best = float("inf")
    end = time.perf_counter() + budget_s
    while (start := time.perf_counter()) < end:
        function()
        best = min(best, time.perf_counter() - start)
    return best


def bench(type: GGMLType, num_rows: int, num_cols: int) -> dict[str, float]:
    weight = random_weight(type, num_rows, num_cols)
    num_bytes = weight.data.numel()
    results: dict[str, float] = {}
    for num_tokens in NUM_TOKENS[:1] if num_rows >= LARGE_ROWS else NUM_TOKENS:
        x = torch.randn(num_tokens, weight.num_cols)
        out = torch.empty(num_tokens, num_rows)
        elapsed = best_seconds(lambda x=x, out=out: kernels.linear(x, weight, None, out))
        name = f"{type.name} {num_rows} x {weight.num_cols}, {num_tokens} tokens"
        results[name] = elapsed
        rate = num_tokens * num_rows * weight.num_cols / elapsed / 1e9
        line = f"{name:32} {elapsed * 1e6:9.0f} us {num_bytes / elapsed / 1e9:7.1f} GB/s"
        line += f" {rate:7.1f} GMAC/s"
        if num_rows >= LARGE_ROWS:
            read_s = best_seconds(weight.data.flatten().view(torch.int64).sum)
            line += f"   (plain read {num_bytes / read_s / 1e9:.1f} GB/s)"
        print(line, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=kernels.get_num_threads())
    parser.add_argument("--types", default=",".join(type.name for type in GGMLType))
    parser.add_argument("--instruction-set", help="default: the best of this CPU")
    options = parser.parse_args()
    kernels.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    if options.instruction_set:
        from llmserve import _cpu_kernels

        _cpu_kernels.set_instruction_set(options.instruction_set)
    torch.manual_seed(0)
    results: dict[str, float] = {}
    for name in options.types.split(","):
        check(GGMLType[name])
        for shape in SHAPES:
            results |= bench(GGMLType[name], *shape)
    print(json.dumps({"threads": options.threads, "seconds": results}))


if __name__ == "__main__":
    main()
