"""Paged attention against torch in float64.

Blocks of all sequences are shuffled over one cache, their first ones may be shared, and all slots
that no query may see hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from llmserve.kernels.cuda.attention import attention_workspace, paged_attention

HEAD_DIMS = [64, 80, 96, 128, 256]
FP8 = torch.float8_e4m3fn

# Of the result, whose values are around 1: rounding of the weights and of the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Batch:
    """Sequences of (tokens of context, queries), the last ones of the context."""

    seqs: list[tuple[int, int]]
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    sliding_window: int | None = None
    logit_softcap: float | None = None
    num_shared_blocks: int = 0  # at the beginning of all sequences
    has_sinks: bool = False
    has_scales: bool = False
    num_padding_tokens: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.seqs) + self.head_dim)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.cache_dtype = self.cache_dtype or self.dtype
        self.scale = self.head_dim**-0.5
        num_queries = [queries for _, queries in self.seqs]
        num_tokens = sum(num_queries) + self.num_padding_tokens
        # Within the rows of a larger projection, as q is in a model.
        projection = randn(num_tokens, (self.num_heads + 2) * self.head_dim) * 2
        projection = projection.to(self.dtype).to(self.device)
        self.q = projection[:, : self.num_heads * self.head_dim].view(
            num_tokens, self.num_heads, self.head_dim
        )
        self.seq_lens = self.on_device([seq_len for seq_len, _ in self.seqs])
        begins = torch.tensor([0, *num_queries]).cumsum(0)
        self.cu_seqlens_q = self.on_device(begins.tolist())
        self._fill_cache(generator)
        self.sinks = randn(self.num_heads).to(self.device) if self.has_sinks else None
        self.k_scale = self.v_scale = None
        if self.has_scales:
            self.k_scale = (randn(self.num_kv_heads).exp() / 2).to(self.device)
            self.v_scale = (randn(self.num_kv_heads).exp() / 2).to(self.device)

    def on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _fill_cache(self, generator: torch.Generator) -> None:
        num_blocks = [-(-seq_len // self.block_size) for seq_len, _ in self.seqs]
        total = sum(num_blocks) + self.num_shared_blocks + 2
        free = torch.randperm(total, generator=generator).tolist()
        shared = [free.pop() for _ in range(self.num_shared_blocks)]
        # What follows the entries of a sequence is no block.
        tables = torch.full((len(self.seqs), max(num_blocks, default=0) + 1), 1 << 30)
        shape = (2, total, self.block_size, self.num_kv_heads, self.head_dim)
        caches = torch.full(shape, float("nan"))
        for seq, (seq_len, queries) in enumerate(self.seqs):
            first = 0
            if self.sliding_window is not None:
                first = max(0, seq_len - queries + 1 - self.sliding_window)
            for i in range(first // self.block_size, num_blocks[seq]):
                is_shared = i < min(self.num_shared_blocks, seq_len // self.block_size)
                block = shared[i] if is_shared else free.pop()
                tables[seq, i] = block
                begin = 0 if is_shared else max(0, first - i * self.block_size)
                end = min(self.block_size, seq_len - i * self.block_size)
                part = caches[:, block, begin:end]
                noise = torch.randn(part.shape, generator=generator)
                part.copy_(torch.where(part.isnan(), noise, part))
        caches = caches.to(self.cache_dtype).to(self.device)
        self.k_cache, self.v_cache = caches[0], caches[1]
        self.block_tables = tables.to(torch.int32).to(self.device)

    def run(self, module: Any, **changes: Any) -> torch.Tensor:
        queries = [queries for _, queries in self.seqs]
        arguments = {
            "max_query_len": max(queries, default=0),
            "max_seq_len": max((seq_len for seq_len, _ in self.seqs), default=0),
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "logit_softcap": self.logit_softcap,
            "sinks": self.sinks,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            **changes,
        }
        return paged_attention(
            module,
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.cu_seqlens_q,
            **arguments,
        )

    def expected(self) -> torch.Tensor:
        """float64 [num_tokens, num_heads * head_dim]."""
        group = self.num_heads // self.num_kv_heads
        result = torch.zeros(self.q.shape, dtype=torch.float64)
        caches = [self.k_cache.cpu().double(), self.v_cache.cpu().double()]
        for i, scale in enumerate((self.k_scale, self.v_scale)):
            if scale is not None:
                caches[i] *= scale.cpu().double()[:, None]
        tables = self.block_tables.cpu().long()
        token = 0
        for seq, (seq_len, queries) in enumerate(self.seqs):
            for i in range(queries):
                end = max(0, seq_len - queries + i + 1)
                seen = torch.arange(max(0, end - (self.sliding_window or end)), end)
                blocks, offsets = tables[seq, seen // self.block_size], seen % self.block_size
                k, v = (cache[blocks, offsets].repeat_interleave(group, dim=1) for cache in caches)
                scores = torch.einsum("hd,khd->hk", self.q[token].cpu().double(), k) * self.scale
                if self.logit_softcap is not None:
                    scores = self.logit_softcap * torch.tanh(scores / self.logit_softcap)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.cpu().double()[:, None]], 1)
                weights = scores.softmax(-1)[:, : len(seen)]
                result[token] = torch.einsum("hk,khd->hd", weights, v)
                token += 1
        return result.flatten(1)


def check(batch: Batch, module: Any, **changes: Any) -> torch.Tensor:
    actual = batch.run(module, **changes)
    assert actual.dtype == batch.dtype
    expected = batch.expected()
    tolerance = TOLERANCE[batch.dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=0, atol=tolerance, equal_nan=False
    )
    return actual


def lengths(block_size: int) -> list[int]:
    return [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5]


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decoding_at_the_edges_of_blocks(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    seqs = [(length, 1) for length in lengths(block_size)]
    check(
        Batch(seqs, 4, 2, head_dim, block_size, dtype, num_shared_blocks=1, device=device),
        cuda_module,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_decoding_in_several_splits(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    seqs = [(256, 1), (257, 1), (700, 1), (1, 1), (0, 1)]
    batch = Batch(seqs, dtype=dtype, cache_dtype=cache_dtype, has_sinks=True, device=device)
    check(batch, cuda_module)
    # A captured graph has the longest sequences that may come, and keeps its workspace.
    workspace = attention_workspace(cuda_module, batch.q, len(seqs), 40000)
    check(batch, cuda_module, max_seq_len=40000, workspace=workspace)


def test_blocks_that_take_several_splits_each(cuda_module: Any, device: torch.device) -> None:
    """More rows than the launch wants blocks, so that each takes all splits of its row."""
    seqs = [(530, 1), *[(2, 1)] * 40]
    check(Batch(seqs, 8, 8, dtype=torch.float16, device=device), cuda_module)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (7, 1), (8, 1), (18, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_query_heads(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    seqs = [(33, 1), (20, 3), (5, 5), (40, 1), (50, 17)]
    check(Batch(seqs, num_heads, num_kv_heads, dtype=dtype, device=device), cuda_module)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_chunks_of_many_lengths(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    seqs = [(70, 70), (2, 2), (90, 31), (65, 1), (64, 64), (33, 16), (17, 17)]
    batch = Batch(seqs, 4, 2, head_dim, 16, dtype, num_shared_blocks=1, device=device)
    check(batch, cuda_module)


@pytest.mark.parametrize("num_queries", [2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70])
def test_each_length_of_a_chunk(cuda_module: Any, device: torch.device, num_queries: int) -> None:
    check(Batch([(100, num_queries)], 2, 2, block_size=32, device=device), cuda_module)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float8_caches_with_scales(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    seqs = [(45, 1), (300, 1), (40, 40), (70, 9)]
    batch = Batch(
        seqs, 4, 2, head_dim, 16, dtype, FP8, has_scales=True, has_sinks=True, device=device
    )
    check(batch, cuda_module)


def test_every_float8_value_is_exact(cuda_module: Any, device: torch.device) -> None:
    """One key: the output is its value, subnormal ones included."""
    values = torch.arange(256, dtype=torch.uint8)
    finite = values[(values & 0x7F) != 0x7F]
    row = torch.cat([finite, finite[:2]]).view(FP8)
    for queries in (1, 2):
        batch = Batch(
            [(queries, queries)], 1, 1, 256, dtype=torch.float16, cache_dtype=FP8, device=device
        )
        block = batch.block_tables[0, 0]
        batch.v_cache[block, :queries, 0] = row.to(device)
        torch.testing.assert_close(
            batch.run(cuda_module)[0].float().cpu(), row.float(), rtol=0, atol=0
        )


@pytest.mark.parametrize("sliding_window", [1, 5, 16, 40, 300, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sliding_windows(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, sliding_window: int
) -> None:
    """Slots before a window hold NaN, and their blocks are not in the table."""
    seqs = [(3, 1), (66, 1), (600, 1), (70, 70), (110, 20), (600, 3)]
    check(Batch(seqs, dtype=dtype, sliding_window=sliding_window, device=device), cuda_module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_and_sinks(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, has_sinks: bool
) -> None:
    seqs = [(10, 1), (300, 1), (50, 20)]
    batch = Batch(seqs, dtype=dtype, logit_softcap=3.0, has_sinks=has_sinks, device=device)
    check(batch, cuda_module)


def test_sinks_far_from_the_logits(cuda_module: Any, device: torch.device) -> None:
    for sink in (-300.0, 300.0):
        batch = Batch([(20, 1), (300, 1), (20, 20)], has_sinks=True, device=device)
        assert batch.sinks is not None
        batch.sinks.fill_(sink)
        check(batch, cuda_module)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 112, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_head_dims_run_without_tensor_cores(
    cuda_module: Any, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    seqs = [(1, 1), (40, 1), (290, 1), (30, 12)]
    check(Batch(seqs, 4, 2, head_dim, 4, dtype, device=device), cuda_module)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16], ids=str)
def test_caches_of_another_type_than_the_queries(
    cuda_module: Any, device: torch.device, cache_dtype: torch.dtype
) -> None:
    batch = Batch([(40, 1), (30, 12)], cache_dtype=cache_dtype, device=device)
    check(batch, cuda_module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_is_zeros(cuda_module: Any, device: torch.device, dtype: torch.dtype) -> None:
    # Sequences of length 0 with one query and with several; tokens that no sequence has.
    seqs = [(20, 1), (0, 1), (30, 4), (0, 3)]
    check(Batch(seqs, dtype=dtype, num_padding_tokens=5, device=device), cuda_module)
    # A batch of decodes, padded with empty sequences.
    batch = Batch(
        [(20, 1), (9, 1), (0, 0), (0, 0)], dtype=dtype, num_padding_tokens=2, device=device
    )
    check(batch, cuda_module)
    assert Batch([], dtype=dtype, device=device).run(cuda_module).shape == (0, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(
    cuda_module: Any, device: torch.device, dtype: torch.dtype
) -> None:
    seqs = [(300, 1), (75, 75), (4, 2), (300, 1), (20, 9)]
    batch = Batch(seqs, 6, 2, dtype=dtype, sliding_window=280, has_sinks=True, device=device)
    together = batch.run(cuda_module, max_seq_len=20000)
    begins = batch.cu_seqlens_q.tolist()
    for seq, (seq_len, queries) in enumerate(seqs):
        alone = paged_attention(
            cuda_module,
            batch.q[begins[seq] : begins[seq + 1]],
            batch.k_cache,
            batch.v_cache,
            batch.block_tables[seq : seq + 1],
            batch.seq_lens[seq : seq + 1],
            batch.on_device([0, queries]),
            max_query_len=queries,
            max_seq_len=seq_len,
            scale=batch.scale,
            sliding_window=280,
            sinks=batch.sinks,
        )
        assert torch.equal(alone, together[begins[seq] : begins[seq + 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_has_the_same_bits_in_any_chunks(
    cuda_module: Any, device: torch.device, dtype: torch.dtype
) -> None:
    batch = Batch([(90, 90)], 6, 2, dtype=dtype, sliding_window=50, device=device)
    # The whole prompt's keys are there from the start: later ones must not matter.
    whole = batch.run(cuda_module)
    begin = 0
    for queries in (2, 13, 40, 35):
        chunk = paged_attention(
            cuda_module,
            batch.q[begin : begin + queries],
            batch.k_cache,
            batch.v_cache,
            batch.block_tables,
            batch.on_device([begin + queries]),
            batch.on_device([0, queries]),
            max_query_len=queries,
            max_seq_len=begin + queries,
            scale=batch.scale,
            sliding_window=50,
        )
        assert torch.equal(chunk, whole[begin : begin + queries])
        begin += queries


def test_long_contexts_have_at_most_64_splits(cuda_module: Any) -> None:
    def splits(max_seq_len: int, sliding_window: int = 0) -> int:
        num_bytes: int = cuda_module.attention_workspace_bytes(
            1, 1, 128, max_seq_len, sliding_window
        )
        return num_bytes // (130 * 4)

    assert splits(256) == 0
    assert splits(257) == 2
    assert splits(63 * 256) == 63
    assert splits(63 * 256 + 1) == splits(1 << 20) == 64
    assert splits(1 << 20, 256) == 2
    assert splits(1 << 20, 255 * 16) == 17


def test_bad_arguments_are_refused(cuda_module: Any, device: torch.device) -> None:
    def refuses(message: str, change: Any) -> None:
        batch = Batch([(20, 1)], device=device)
        arguments = change(batch) or {}
        with pytest.raises(ValueError, match=message):
            batch.run(cuda_module, **arguments)

    def replace(name: str, make: Any) -> Any:
        return lambda batch: setattr(batch, name, make(getattr(batch, name)))

    refuses("q must be", replace("q", lambda q: q.double()))
    refuses("multiple of 1 heads", replace("q", lambda q: q[..., :32]))
    refuses("multiples of 16 bytes", replace("q", lambda q: torch.cat([q, q], 2)[..., 1:65]))
    refuses("k_cache must be", replace("k_cache", lambda cache: cache.double()))
    refuses("be alike", replace("v_cache", lambda cache: cache.half()))
    refuses("contiguous", replace("k_cache", lambda cache: torch.cat([cache, cache], 3)[..., :64]))
    refuses("block_tables must be", replace("block_tables", lambda tables: tables.long()))
    refuses("seq_lens must be", replace("seq_lens", lambda lens: lens.long()))
    refuses("cu_seqlens_q must be", replace("cu_seqlens_q", lambda lens: lens[:1]))
    refuses("sliding_window is 0", lambda _: {"sliding_window": 0})
    refuses("logit_softcap is -1", lambda _: {"logit_softcap": -1.0})
    refuses("scale is 0", lambda _: {"scale": 0.0})
    refuses("sinks must be", lambda _: {"sinks": torch.zeros(3, device=device)})
    refuses(
        "workspace must be",
        lambda _: {
            "max_seq_len": 4000,
            "workspace": torch.zeros(64, dtype=torch.uint8, device=device),
        },
    )
