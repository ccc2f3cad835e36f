"""Times paged attention, after a check against the reference, and the elementwise kernels.

Decode gives GB/s of K and V read, prefill GFLOP/s (2 per multiply-add, visible pairs only). Each
time is the median of several calls. The last line is JSON.

    python bench/bench_attention.py [--threads 2] [--dtype float16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmserve import kernels
from llmserve.kernels import reference_attention as reference

BLOCK_SIZE = 16
HEADS = [(4, 1, 256), (32, 8, 128)]  # num_heads, num_kv_heads, head_dim
DECODES = [(1, 512), (1, 4096), (8, 512), (8, 4096), (32, 512), (32, 4096)]  # sequences, context
PREFILLS = [(512, 512), (512, 4096), (2048, 2048)]  # queries, context


@dataclass
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    def run(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        scale = self.q.shape[2] ** -0.5
        return function(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.cu_seqlens_q,
            scale=scale,
        )


def make_batch(
    num_seqs: int, num_queries: int, context: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> Batch:
    num_heads, num_kv_heads, head_dim = heads
    blocks_per_seq = -(-context // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq + 1
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    order = torch.randperm(num_blocks - 1, dtype=torch.int32) + 1
    return Batch(
        q=torch.randn(num_seqs * num_queries, num_heads, head_dim),
        k_cache=torch.randn(shape).to(dtype),
        v_cache=torch.randn(shape).to(dtype),
        block_tables=order.reshape(num_seqs, blocks_per_seq),
        seq_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries,
    )


def seconds(function: Callable[[], object], budget_s: float = 0.6) -> float:
    """Median time of a call."""
    function()
    times: list[float] = []
    while sum(times) < budget_s and len(times) < 300:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check(batch: Batch) -> None:
    error = (batch.run(kernels.paged_attention) - batch.run(reference.paged_attention)).abs().max()
    if not error < 1e-5:
        raise SystemExit(f"paged_attention is off by {error:.2e}")


def bench_decode(dtype: torch.dtype, results: dict[str, float]) -> None:
    for heads in HEADS:
        check(make_batch(2, 1, 300, heads, dtype))
        for num_seqs, context in DECODES:
            batch = make_batch(num_seqs, 1, context, heads, dtype)
            elapsed = seconds(lambda b=batch: b.run(kernels.paged_attention))
            num_bytes = 2 * num_seqs * context * heads[1] * heads[2] * dtype.itemsize
            name = f"decode {heads[0]}/{heads[1]} x {heads[2]}, {num_seqs} x {context}"
            results[name] = elapsed
            print(f"{name:40} {elapsed * 1e6:10.0f} us {num_bytes / elapsed / 1e9:8.1f} GB/s")


def bench_prefill(dtype: torch.dtype, results: dict[str, float]) -> None:
    for heads in HEADS:
        check(make_batch(1, 40, 300, heads, dtype))
        for num_queries, context in PREFILLS:
            batch = make_batch(1, num_queries, context, heads, dtype)
            elapsed = seconds(lambda b=batch: b.run(kernels.paged_attention))
            pairs = num_queries * (2 * context - num_queries + 1) // 2 * heads[0]
            flops = 4 * pairs * heads[2]
            name = f"prefill {heads[0]}/{heads[1]} x {heads[2]}, {num_queries} of {context}"
            results[name] = elapsed
            print(f"{name:40} {elapsed * 1e6:10.0f} us {flops / elapsed / 1e9:8.1f} GFLOP/s")


def bench_elementwise(dtype: torch.dtype, results: dict[str, float]) -> None:
    for num_tokens in (1, 512):
        x, weight = torch.randn(num_tokens, 640), torch.randn(640)
        gate_up = torch.randn(num_tokens, 2 * 2048)
        q, k = torch.randn(num_tokens, 4, 256), torch.randn(num_tokens, 1, 256)
        tables = torch.randn(num_tokens, 128)
        positions = torch.arange(num_tokens)
        cache = torch.zeros(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, 1, 256, dtype=dtype)
        logits = torch.randn(num_tokens, 640)
        calls: dict[str, Callable[[], object]] = {
            "rms_norm 640": lambda x=x, w=weight: kernels.rms_norm(x, w, 1e-6),
            "rotary 4+1 x 256": lambda q=q, k=k, p=positions, t=tables: kernels.rotary(
                q, k, p, t, t
            ),
            "gelu_tanh_mul 2048": lambda g=gate_up: kernels.act_mul(g, "gelu_tanh"),
            "write_kv 1 x 256": lambda k=k, c=cache, p=positions: kernels.write_kv(k, k, c, c, p),
            "softcap 640": lambda x=logits: kernels.softcap(x, 30.0),
        }
        for call_name, call in calls.items():
            name = f"{call_name}, {num_tokens} tokens"
            results[name] = seconds(call, 0.2)
            print(f"{name:40} {results[name] * 1e6:10.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=kernels.get_num_threads())
    parser.add_argument("--dtype", default="float16", choices=["float32", "float16", "bfloat16"])
    options = parser.parse_args()
    kernels.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    results: dict[str, float] = {}
    bench_decode(dtype, results)
    bench_prefill(dtype, results)
    bench_elementwise(dtype, results)
    print(json.dumps({"threads": options.threads, "dtype": options.dtype, "seconds": results}))


if __name__ == "__main__":
    main()
