"""The calls that bench/kernels.py times, with what each of them has to read and to multiply.

Weights and KV caches lie in memory of their own, of which a call uses another part than the one
before, so that no cache holds them: as in a forward pass, which reads all layers before it comes
back to the first. Activations are small and stay in the caches, there and here.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from bench import bench_sampling
from llmserve import kernels
from llmserve.kernels import GGMLType, Weight, reference, reference_attention

BLOCK_SIZE = 16
TOKENS = [1, 2, 8, 32, 512]
# The runner computes 16 rows of logits at a time, so 512 rows of one never happen.
LOGIT_TOKENS = TOKENS[:-1]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """num_rows, num_cols of the weights of a layer, and of the logits."""
        q_size = self.num_heads * self.head_dim
        return {
            "q": (q_size, self.hidden_size),
            "o": (self.hidden_size, q_size),
            "gate": (self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "logits": (self.vocab_size, self.hidden_size),
        }


MODELS = [
    Model("gemma-3-270m", 640, 2048, 262144, num_heads=4, num_kv_heads=1, head_dim=256),
    Model("qwen3-0.6b", 1024, 3072, 151936, num_heads=16, num_kv_heads=8, head_dim=128),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel on one input. num_bytes: of weights, cache or rows, each counted once a call."""

    kernel: str
    size: str
    num_tokens: int
    run: Callable[[], object]
    num_bytes: int
    num_macs: int = 0  # multiply-adds, of the type that `macs` names
    macs: str = "float32"
    pages: str = ""  # "huge_pages_" if the bytes lie in such


class Memory:
    """Private memory full of bytes below 64, which are small finite numbers in every float type."""

    def __init__(self, num_bytes: int, has_huge_pages: bool) -> None:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if has_huge_pages else mmap.MADV_NOHUGEPAGE)
        self.data = torch.frombuffer(memory, dtype=torch.uint8)
        pattern = torch.randint(0, 64, (1 << 20,), dtype=torch.uint8)
        self.pages = "huge_pages_" if has_huge_pages else ""
        for start in range(0, num_bytes, len(pattern)):
            part = self.data[start : start + len(pattern)]
            part.copy_(pattern[: len(part)])

    def parts(self, num_bytes: int) -> list[torch.Tensor]:
        """As many parts of that size as fit, aligned as weights in memory are."""
        step = -(-num_bytes // 64) * 64
        starts = range(0, len(self.data) - num_bytes + 1, step)
        return [self.data[start : start + num_bytes] for start in starts]


def rotate(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Each call of the result is one of the given, in turn."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def largest_matrix_bytes(types: list[GGMLType]) -> int:
    shapes = [shape for model in MODELS for shape in model.matrices().values()]
    return max(
        kernels.kept_bytes(type, rows, padded_cols(type, cols))
        for type in types
        for rows, cols in shapes
    )


def padded_cols(type: GGMLType, num_cols: int) -> int:
    """A K-quant needs a multiple of 256 columns."""
    return -(-num_cols // type.block_len) * type.block_len


def linear_cases(memory: Memory, types: list[GGMLType]) -> Iterator[Case]:
    for type in types:
        check_linear(type)
        for model in MODELS:
            for name, shape in model.matrices().items():
                for num_tokens in LOGIT_TOKENS if name == "logits" else TOKENS:
                    yield linear_case(memory, type, shape, num_tokens)


def linear_case(memory: Memory, type: GGMLType, shape: tuple[int, int], num_tokens: int) -> Case:
    num_rows, num_cols = shape[0], padded_cols(type, shape[1])
    num_bytes = kernels.kept_bytes(type, num_rows, num_cols)
    x, out = torch.randn(num_tokens, num_cols), torch.empty(num_tokens, num_rows)

    def call(data: torch.Tensor) -> Callable[[], object]:
        weight = Weight(data, type, num_rows, num_cols, is_packed=True)
        return lambda: kernels.linear(x, weight, None, out)

    return Case(
        kernel=f"linear {type.name}",
        size=f"{num_rows} x {num_cols}",
        num_tokens=num_tokens,
        run=rotate([call(part) for part in memory.parts(num_bytes)]),
        num_bytes=num_bytes,
        num_macs=num_tokens * num_rows * num_cols,
        macs=_macs(type),
        pages=memory.pages,
    )


def _macs(type: GGMLType) -> str:
    if type.is_quantized:
        return "int16"
    return "bfloat16" if _rounds_activations(type) else "float32"


def _rounds_activations(type: GGMLType) -> bool:
    """Products of bfloat16 with bfloat16."""
    if type is not GGMLType.BF16 or not kernels.HAS_EXT:
        return False
    from llmserve import _cpu_kernels

    return "avx512_bf16" in _cpu_kernels.available_instruction_sets()


def check_linear(type: GGMLType) -> None:
    data = torch.randint(0, 64, (64, type.row_bytes(512)), dtype=torch.uint8)
    weight, x = Weight(data, type, 64, 512), torch.randn(40, 512)
    expected = reference.linear(x, weight)
    error = (kernels.linear(x, weight) - expected).abs().max() / expected.abs().max()
    if not error < (4e-3 if _rounds_activations(type) else 1e-3):
        raise SystemExit(f"linear is off by {error:.2e} of its range for {type.name}")


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length whose last tokens attend. Shapes as in paged_attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    def run(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        return function(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.cu_seqlens_q,
            scale=self.q.shape[2] ** -0.5,
        )


def make_batch(
    model: Model, num_seqs: int, num_queries: int, context: int, dtype: torch.dtype
) -> Batch:
    blocks_per_seq = -(-context // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    order = torch.randperm(num_blocks, dtype=torch.int32)
    return Batch(
        q=torch.randn(num_seqs * num_queries, model.num_heads, model.head_dim),
        k_cache=torch.randn(shape).to(dtype),
        v_cache=torch.randn(shape).to(dtype),
        block_tables=order.reshape(num_seqs, blocks_per_seq),
        seq_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries,
    )


def check_attention(batch: Batch) -> None:
    expected = batch.run(reference_attention.paged_attention)
    error = (batch.run(kernels.paged_attention) - expected).abs().max()
    if not error < 1e-5:
        raise SystemExit(f"paged_attention is off by {error:.2e}")


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Decode of several sequences, and a chunk of a prompt, of which only visible pairs count."""
    sizes = [(1, 1, 512), (1, 1, 4096), (8, 1, 512), (8, 1, 4096), (32, 1, 512), (1, 512, 512)]
    for model in MODELS:
        check_attention(make_batch(model, 2, 20, 300, dtype))
        for num_seqs, num_queries, context in [*sizes, (1, 512, 4096)]:
            batch = make_batch(model, num_seqs, num_queries, context, dtype)
            cache_bytes = batch.k_cache.nbytes + batch.v_cache.nbytes
            copies = min(64, 1 + (64 << 20) // cache_bytes) if num_queries == 1 else 1
            batches = [
                replace(batch, k_cache=batch.k_cache.clone(), v_cache=batch.v_cache.clone())
                for _ in range(copies)
            ]
            pairs = num_queries * (2 * context - num_queries + 1) // 2 * num_seqs
            yield Case(
                kernel="attention " + ("decode" if num_queries == 1 else "prefill"),
                size=f"{model.num_heads}/{model.num_kv_heads} x {model.head_dim}, "
                f"{num_seqs} x {context}",
                num_tokens=num_seqs * num_queries,
                run=rotate([partial(b.run, kernels.paged_attention) for b in batches]),
                num_bytes=cache_bytes,
                num_macs=2 * pairs * model.num_heads * model.head_dim,
            )


def check_elementwise(dtype: torch.dtype) -> None:
    x, weight, gate_up = torch.randn(9, 64), torch.randn(64), torch.randn(9, 128)
    positions, angles = torch.arange(9), torch.randn(9, 32)
    results = []
    for library in (kernels, reference_attention):
        q, k = x.clone().reshape(9, 1, 64), x.clone().reshape(9, 1, 64)
        residual, capped = x.clone(), x.clone()
        k_cache, v_cache = torch.zeros(2, 1, BLOCK_SIZE, 1, 64, dtype=dtype)
        library.rotary(q, k, positions, angles.cos(), angles.sin())
        library.write_kv(k, x.reshape(9, 1, 64), k_cache, v_cache, positions)
        library.softcap(capped, 2.0)
        norms = [library.rms_norm(x, weight, 1e-6)]
        norms.append(library.add_rms_norm(gate_up[:, :64].contiguous(), residual, weight, 1e-6))
        products = [library.act_mul(gate_up, name) for name in ("silu", "gelu_tanh")]
        results.append([q, k, k_cache.float(), v_cache.float(), capped, *norms, *products])
    for got, expected in zip(*results, strict=True):
        # A value between two numbers of the cache's type may be rounded to either.
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-5)


def elementwise_cases(dtype: torch.dtype) -> Iterator[Case]:
    check_elementwise(dtype)
    for model in MODELS:
        of_all = [elementwise_cases_of(model, num_tokens, dtype) for num_tokens in (1, 32, 512)]
        yield from itertools.chain.from_iterable(zip(*of_all, strict=True))


def elementwise_cases_of(model: Model, num_tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    """num_bytes: what is read and what is written."""
    size, intermediate = model.hidden_size, model.intermediate_size
    num_heads, num_kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    x, residual = torch.randn(num_tokens, size), torch.zeros(num_tokens, size)
    weight = torch.randn(size)
    gate_up = torch.randn(num_tokens, 2 * intermediate)
    q, k = torch.randn(num_tokens, num_heads, dim), torch.randn(num_tokens, num_kv_heads, dim)
    positions = torch.arange(num_tokens)
    angles = positions[:, None] * torch.logspace(0, -4, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = torch.zeros(num_blocks, BLOCK_SIZE, num_kv_heads, dim, dtype=dtype)
    calls: list[tuple[str, str, Callable[[], object], int]] = [
        ("rms_norm", f"{size}", lambda: kernels.rms_norm(x, weight, 1e-6), 2 * x.nbytes),
        (
            "rms_norm, heads",
            f"{num_heads} x {dim}",
            lambda: kernels.rms_norm(q, weight[:dim], 1e-6),
            2 * q.nbytes,
        ),
        (
            "add_rms_norm",
            f"{size}",
            lambda: kernels.add_rms_norm(x, residual, weight, 1e-6),
            4 * x.nbytes,
        ),
        (
            "rotary",
            f"{num_heads}+{num_kv_heads} x {dim}",
            lambda: kernels.rotary(q, k, positions, cos, sin),
            2 * (q.nbytes + k.nbytes),
        ),
        (
            "write_kv",
            f"2 x {num_kv_heads} x {dim}",
            lambda: kernels.write_kv(k, k, cache, cache, positions),
            2 * k.numel() * (4 + dtype.itemsize),
        ),
        *(
            (
                f"{activation}_mul",
                f"{intermediate}",
                partial(kernels.act_mul, gate_up, activation),
                gate_up.nbytes * 3 // 2,
            )
            for activation in ("silu", "gelu_tanh")
        ),
    ]
    for kernel, text, run, num_bytes in calls:
        yield Case(kernel, text, num_tokens, run, num_bytes)


def sampling_cases() -> Iterator[Case]:
    """num_tokens is the number of rows. Logits as bench_sampling.py draws them, "zipf"."""
    for model in MODELS:
        num_rows, vocab_size = 8, model.vocab_size
        logits = bench_sampling.make_logits("zipf", num_rows, vocab_size)
        row_ids = np.arange(num_rows, dtype=np.int32)
        token_ids = np.zeros(num_rows, np.int32)
        for name in ("greedy", "temperature 1", "top_p 0.9", "top_k 50", "min_p 0.05"):
            params = bench_sampling.make_params(num_rows, bench_sampling.CASES[name])
            bench_sampling.check(logits, params)
            yield Case(
                f"sample, {name}",
                f"{vocab_size}",
                num_rows,
                partial(kernels.sample_rows, logits, params),
                logits.nbytes,
            )
        yield Case(
            "logprobs, top 5",
            f"{vocab_size}",
            num_rows,
            partial(kernels.logprob_rows, logits, row_ids, token_ids, 5),
            logits.nbytes,
        )
        capped = logits.clone()
        yield Case(
            "softcap",
            f"{vocab_size}",
            num_rows,
            partial(kernels.softcap, capped, 30.0),
            2 * logits.nbytes,
        )
