"""Paged attention against torch's dense attention in float64, and its independence of company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from llmserve.kernels import HAS_EXT, get_num_threads, paged_attention, set_num_threads, write_kv

if HAS_EXT:
    from llmserve import _cpu_kernels

    INSTRUCTION_SETS = [s for s in _cpu_kernels.available_instruction_sets() if "avx512" not in s]
else:
    INSTRUCTION_SETS = ["reference"]

# The oracle gets K and V as the cache rounded them, so what is left is float32 arithmetic: a sum of
# some hundred products of order 1, each good to 6e-8, in scores and again in the output.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-6, torch.bfloat16: 3e-6}

HEADS = [
    (4, 1, 256),
    (8, 2, 128),
    (12, 4, 96),
    (5, 1, 80),
    (3, 3, 64),
    (32, 2, 32),
    (6, 3, 20),
    (2, 1, 7),
]


@dataclass
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    keys: list[torch.Tensor]  # per sequence, as stored, float64 [seq_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]

    def run(self, **options: float | int | None) -> torch.Tensor:
        scale = self.q.shape[2] ** -0.5
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.cu_seqlens_q,
            scale=scale,
            **options,  # type: ignore[arg-type]
        )

    def part(self, seq: int, begin: int, end: int) -> Batch:
        """Queries [begin, end) of one sequence as a chunk of their own, the later ones undone."""
        first = int(self.cu_seqlens_q[seq])
        num_queries = int(self.cu_seqlens_q[seq + 1]) - first
        seq_len = int(self.seq_lens[seq]) - num_queries + end
        is_last = end == num_queries
        batch = replace(
            self,
            q=self.q[first + begin : first + end],
            k_cache=self.k_cache if is_last else self.k_cache.clone(),
            v_cache=self.v_cache if is_last else self.v_cache.clone(),
            block_tables=self.block_tables[seq : seq + 1],
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        block_size = self.k_cache.shape[1]
        for position in range(seq_len, int(self.seq_lens[seq])):
            block_id = int(self.block_tables[seq, position // block_size])
            batch.k_cache[block_id, position % block_size] = float("nan")
            batch.v_cache[block_id, position % block_size] = float("nan")
        return batch


def make_batch(
    heads: tuple[int, int, int],
    lengths: list[tuple[int, int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    num_shared_blocks: int = 0,
) -> Batch:
    """Sequences of (num_queries, seq_len) in shuffled blocks; every slot without a token is NaN.

    The first `num_shared_blocks` blocks are the same for all. Table entries after the last block
    name a block that does not exist.
    """
    generator = torch.Generator().manual_seed(7)
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(counts) + 2
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=dtype)
    v_cache = torch.full(shape, float("nan"), dtype=dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shared = [free.pop() for _ in range(num_shared_blocks)]
    block_tables = torch.full((len(lengths), max(counts, default=0) + 1), 1 << 30).int()
    keys, values = [], []
    for seq, (_, seq_len) in enumerate(lengths):
        own = [free.pop() for _ in range(counts[seq] - num_shared_blocks)]
        block_ids = torch.tensor(shared + own, dtype=torch.int64)
        block_tables[seq, : counts[seq]] = block_ids
        positions = torch.arange(seq_len)
        blocks, offsets = block_ids[positions // block_size], positions % block_size
        k = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator)
        v = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator)
        write_kv(k, v, k_cache, v_cache, blocks * block_size + offsets)
    for seq, (_, seq_len) in enumerate(lengths):
        positions = torch.arange(seq_len)
        blocks, offsets = block_tables[seq, positions // block_size], positions % block_size
        keys.append(k_cache[blocks, offsets].double())
        values.append(v_cache[blocks, offsets].double())
    num_queries = torch.tensor([0] + [n for n, _ in lengths])
    return Batch(
        q=torch.randn(int(num_queries.sum()), num_heads, head_dim, generator=generator),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        cu_seqlens_q=num_queries.cumsum(0).int(),
        keys=keys,
        values=values,
    )


def dense_attention(
    batch: Batch, sliding_window: int | None = None, logit_softcap: float | None = None
) -> torch.Tensor:
    """float64 [num_tokens, num_heads * head_dim] from K and V as they lie in the sequences."""
    rows = []
    for seq, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        begin, end = batch.cu_seqlens_q[seq : seq + 2].tolist()
        seq_len = len(k)
        query_positions = torch.arange(seq_len - (end - begin), seq_len).unsqueeze(1)
        distance = query_positions - torch.arange(seq_len)
        is_seen = distance >= 0
        if sliding_window is not None:
            is_seen &= distance < sliding_window
        group = batch.q.shape[1] // k.shape[1]
        q = batch.q[begin:end].double().transpose(0, 1)
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        if logit_softcap is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_seen)
        else:
            scores = logit_softcap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / logit_softcap)
            out = scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ v
        rows.append(out.transpose(0, 1).flatten(1))
    return torch.cat(rows)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(name)
    yield name
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


@pytest.fixture
def num_threads_restored() -> Iterator[None]:
    num_threads = get_num_threads()
    yield
    set_num_threads(num_threads)


def assert_close(batch: Batch, **options: float | int | None) -> None:
    expected = dense_attention(batch, **options)  # type: ignore[arg-type]
    error = (batch.run(**options).double() - expected).abs().max()
    assert error < TOLERANCE[batch.k_cache.dtype]


def around(block_size: int) -> list[tuple[int, int]]:
    """Decodes and chunks of lengths where blocks and ranges of 128 keys begin and end."""
    lengths = [1, block_size - 1, block_size, block_size + 1, 127, 128, 129, 300]
    decodes = [(1, n) for n in lengths]
    chunks = [(n, n) for n in lengths[:4]] + [(2, 129), (3, 260), (130, 130), (70, 257)]
    return decodes + chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.usefixtures("instruction_set")
def test_decodes_and_chunks_equal_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert_close(make_batch(heads, around(16), 16, dtype))


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_any_block_size_gives_the_same_attention(block_size: int) -> None:
    assert_close(make_batch((4, 2, 64), around(max(2, block_size)), block_size))


@pytest.mark.parametrize("lengths", [[(1, 2000)], [(70, 2000)], [(1, 2000), (5, 5)]], ids=str)
def test_long_context_equals_dense_attention(lengths: list[tuple[int, int]]) -> None:
    assert_close(make_batch((8, 2, 128), lengths))


@pytest.mark.parametrize("window", [1, 2, 16, 100, 128, 129, 1000])
@pytest.mark.usefixtures("instruction_set")
def test_sliding_window_hides_what_lies_before_it(window: int) -> None:
    assert_close(make_batch((4, 1, 64), around(16)), sliding_window=window)


@pytest.mark.parametrize("cap", [0.5, 20.0])
@pytest.mark.usefixtures("instruction_set")
def test_softcap_bounds_the_scores(cap: float) -> None:
    assert_close(make_batch((4, 2, 64), around(16)), logit_softcap=cap, sliding_window=100)


def test_blocks_may_be_shared_between_sequences() -> None:
    assert_close(make_batch((4, 1, 64), [(1, 40), (3, 50), (1, 33)], 16, num_shared_blocks=2))


def test_queries_may_be_a_part_of_a_fused_projection() -> None:
    batch = make_batch((4, 2, 32), [(3, 40), (1, 7)])
    fused = torch.full((4, 8 * 32), float("nan"))
    view = fused[:, : 4 * 32].view(4, 4, 32)
    view.copy_(batch.q)

    assert torch.equal(replace(batch, q=view).run(), batch.run())


def test_cache_may_be_a_part_of_larger_blocks() -> None:
    batch = make_batch((4, 2, 32), [(3, 40), (1, 7)])
    both = torch.stack([batch.k_cache, batch.v_cache], dim=1)

    assert torch.equal(
        replace(batch, k_cache=both[:, 0], v_cache=both[:, 1]).run(),
        batch.run(),
    )


def test_block_tables_may_be_a_part_of_wider_ones() -> None:
    batch = make_batch((4, 2, 32), [(3, 40), (1, 7)])
    wide = torch.nn.functional.pad(batch.block_tables, (0, 5), value=-1)

    assert torch.equal(
        replace(batch, block_tables=wide[:, : batch.block_tables.shape[1]]).run(), batch.run()
    )


def test_result_goes_to_the_tensor_that_is_given() -> None:
    batch = make_batch((4, 2, 32), [(3, 40)])
    out = torch.full((3, 128), float("nan"))

    assert batch.run(out=out) is out  # type: ignore[arg-type]
    assert torch.equal(out, batch.run())


def test_empty_batch_gives_no_rows() -> None:
    assert make_batch((4, 2, 32), []).run().shape == (0, 128)


def test_sequence_without_queries_is_passed_over() -> None:
    batch = make_batch((4, 2, 32), [(0, 0), (2, 20), (0, 30), (1, 9)])

    assert torch.equal(batch.run()[:2], batch.part(1, 0, 2).run())


def test_table_entries_before_the_window_are_not_read() -> None:
    batch = make_batch((4, 1, 64), [(1, 400), (40, 400)])
    expected = batch.run(sliding_window=100)
    batch.block_tables[0, : 300 // 16] = -1
    batch.block_tables[1, : 261 // 16] = 1 << 30

    assert torch.equal(batch.run(sliding_window=100), expected)


@pytest.mark.usefixtures("instruction_set")
def test_nan_in_a_later_token_does_not_reach_the_queries_before_it() -> None:
    batch = make_batch((3, 3, 64), [(70, 200)])
    clean = batch.run()
    position = 150
    block_id = int(batch.block_tables[0, position // 16])
    batch.k_cache[block_id, position % 16] = float("nan")
    batch.v_cache[block_id, position % 16] = float("nan")
    poisoned = batch.run()

    assert torch.equal(poisoned[:20], clean[:20])
    assert poisoned[20:].isnan().all()


@pytest.mark.parametrize("heads", [(4, 1, 256), (8, 8, 64), (6, 2, 20), (32, 4, 32)], ids=str)
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.usefixtures("instruction_set")
def test_chunks_give_the_bits_of_the_whole_prompt(
    heads: tuple[int, int, int], window: int | None
) -> None:
    batch = make_batch(heads, [(330, 330)])
    whole = batch.run(sliding_window=window)
    begin = 0
    for size in (1, 2, 5, 60, 64, 1, 127, 70):
        chunk = batch.part(0, begin, begin + size).run(sliding_window=window)

        assert torch.equal(chunk, whole[begin : begin + size])
        begin += size


@pytest.mark.parametrize("heads", [(4, 1, 256), (8, 8, 64), (6, 2, 20), (32, 4, 32)], ids=str)
@pytest.mark.usefixtures("instruction_set")
def test_sequence_alone_has_the_bits_it_has_among_32_others(heads: tuple[int, int, int]) -> None:
    lengths = [(1, 37 * i + 1) for i in range(25)] + [(i * 9, i * 40) for i in range(1, 9)]
    batch = make_batch(heads, lengths)
    together = batch.run()
    for seq in range(len(lengths)):
        begin, end = batch.cu_seqlens_q[seq : seq + 2].tolist()
        alone = batch.part(seq, 0, end - begin).run()

        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize("heads", [(4, 1, 256), (32, 8, 64)], ids=str)
@pytest.mark.parametrize("lengths", [[(1, 900)], [(150, 700)], [(1, 900), (1, 5), (33, 40)]])
@pytest.mark.usefixtures("num_threads_restored")
def test_number_of_threads_does_not_change_a_bit(
    heads: tuple[int, int, int], lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(heads, lengths)
    results = []
    for num_threads in (1, 2, 5):
        set_num_threads(num_threads)
        results.append(batch.run())

    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 32, dtype=torch.float64)}, "q must be float32"),
        ({"q": torch.zeros(3, 1, 4, 32)}, "q must be float32"),
        ({"q": torch.zeros(3, 4, 64)[:, :, ::2]}, "adjacent elements"),
        ({"q": torch.zeros(3, 3, 32)}, "does not fit a cache"),
        ({"q": torch.zeros(3, 4, 16)}, "does not fit a cache"),
        ({"q": torch.zeros(3, 4, 32, device="meta")}, "CPU memory"),
        ({"q": torch.zeros(4, 4, 32)}, "q has 4 tokens"),
        ({"k_cache": torch.zeros(5, 16, 2, 32, dtype=torch.float64)}, "k_cache must be"),
        ({"v_cache": torch.zeros(5, 16, 64)}, "v_cache must be"),
        ({"v_cache": torch.zeros(5, 16, 2, 32)}, "must be alike"),
        ({"k_cache": torch.zeros(5, 2, 16, 32).half().transpose(1, 2)}, "must be contiguous"),
        ({"block_tables": torch.zeros(1, 4, dtype=torch.int64)}, "block_tables must be int32"),
        ({"block_tables": torch.zeros(1, 2, dtype=torch.int32)}, "sequence 0 of length 40"),
        ({"seq_lens": torch.tensor([40, 40], dtype=torch.int32)}, "seq_lens must be"),
        ({"seq_lens": torch.tensor([2], dtype=torch.int32)}, "sequence 0 of length 2"),
        ({"seq_lens": torch.tensor([40])}, "seq_lens must be contiguous torch.int32"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "cu_seqlens_q must be contiguous torch.int32"),
        ({"cu_seqlens_q": torch.tensor([1, 3], dtype=torch.int32)}, "must start with 0"),
    ],
)
def test_unfit_tensors_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    batch = make_batch((4, 2, 32), [(3, 40)])

    with pytest.raises(ValueError, match=message):
        replace(batch, **change).run()  # type: ignore[arg-type]


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"logit_softcap": -1.0}, "logit_softcap is -1.0"),
        ({"out": torch.zeros(3, 4, 32)}, "out must be contiguous torch.float32"),
        ({"out": torch.zeros(3, 128, dtype=torch.float16)}, "out must be contiguous torch.float32"),
    ],
)
def test_unfit_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch((4, 2, 32), [(3, 40)]).run(**options)


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
def test_block_that_does_not_exist_is_refused() -> None:
    batch = make_batch((4, 2, 32), [(3, 40)])
    batch.block_tables[0, 1] = len(batch.k_cache)

    with pytest.raises(IndexError, match="a block that does not exist"):
        batch.run()


@pytest.mark.skipif(not HAS_EXT, reason="the reference does not check")
def test_decreasing_query_offsets_are_refused() -> None:
    batch = make_batch((4, 2, 32), [(3, 40), (2, 20)])
    batch.cu_seqlens_q = torch.tensor([0, 7, 5], dtype=torch.int32)

    with pytest.raises(ValueError, match="must not decrease"):
        batch.run()
