"""Bytes a second of single kernels beside what a copy moves on the same device.

Bytes are what a call has to read and write, each once. Calls are launched by a graph, as they are
in decode steps, on data that no cache holds; short ones show what a launch costs.

    python -m bench.gpu.kernels [--figures FILE] [--tiny]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu.device import Device, open_device
from bench.gpu.figures import Figures
from bench.gpu.roofs import measure_roofs
from llmserve.core.ggml import GGMLType
from llmserve.kernels import SAMPLING_ROW, Weight
from llmserve.kernels.cuda import attention, elementwise, linear, sampling
from llmserve.kernels.cuda.packing import DeviceMatrix, pack_weight
from llmserve.kernels.layer_parameters import NormParameters

BLOCK_SIZE = 16
_MIN_CALLS = 16
_ATTENTION_SHARE = 0.85
# Where blocks of a type keep float16 scales, which have to be finite.
_SCALES = {GGMLType.Q4_K: (0, 2), GGMLType.Q8_0: (0,)}


@dataclass(frozen=True, slots=True)
class Case:
    """calls: the kernel on one piece of data after the other. num_bytes: of one call."""

    name: str
    calls: Sequence[Callable[[], object]]
    num_bytes: int
    least_share: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """num_tokens: of the steps that norms and activations are timed for."""

    num_seqs: int
    context: int
    heads: tuple[tuple[int, int], ...]
    head_dim: int
    num_tokens: tuple[int, int]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_rows: int


_FULL = Sizes(64, 4096, ((32, 8), (64, 8)), 128, (64, 8192), 4096, 14336, 128256, 4096)
_TINY = Sizes(3, 40, ((4, 2),), 64, (2, 5), 64, 256, 5000, 24)


def attention_case(
    device: Device, sizes: Sizes, heads: tuple[int, int], cache_type: torch.dtype
) -> Case:
    """Decoding: one query for each sequence, over blocks in random order."""
    place = device.torch_device
    num_heads, num_kv_heads = heads
    blocks_per_seq = -(-sizes.context // BLOCK_SIZE)
    num_blocks = sizes.num_seqs * blocks_per_seq
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, sizes.head_dim)
    k_cache, v_cache = (
        torch.randn(shape, dtype=torch.bfloat16, device=place).to(cache_type) for _ in range(2)
    )
    tables = torch.randperm(num_blocks, device=place).to(torch.int32)
    tables = tables.view(sizes.num_seqs, blocks_per_seq)
    q = torch.randn(sizes.num_seqs, num_heads, sizes.head_dim, device=place).bfloat16()
    seq_lens = torch.full((sizes.num_seqs,), sizes.context, dtype=torch.int32, device=place)
    cu_seqlens = torch.arange(sizes.num_seqs + 1, dtype=torch.int32, device=place)
    out = torch.empty(sizes.num_seqs, num_heads * sizes.head_dim, dtype=q.dtype, device=place)
    workspace = attention.attention_workspace(device.module, q, sizes.num_seqs, sizes.context)

    def call() -> torch.Tensor:
        return attention.paged_attention(
            device.module,
            q,
            k_cache,
            v_cache,
            tables,
            seq_lens,
            cu_seqlens,
            max_query_len=1,
            max_seq_len=sizes.context,
            scale=sizes.head_dim**-0.5,
            out=out,
            workspace=workspace,
        )

    kept = sizes.num_seqs * sizes.context * num_kv_heads * sizes.head_dim * cache_type.itemsize
    return Case(
        f"decode attention, {sizes.num_seqs} x {sizes.context} keys, {num_heads}/{num_kv_heads} "
        f"heads, {_short(cache_type)}",
        [call] * (1 if device.is_emulated else 4),
        2 * kept + q.nbytes + out.nbytes,
        _ATTENTION_SHARE,
    )


def norm_case(device: Device, sizes: Sizes, num_tokens: int) -> Case:
    """residual += x; x = rms_norm(residual)."""
    place, shape = device.torch_device, (num_tokens, sizes.hidden_size)
    norm = NormParameters(torch.ones(sizes.hidden_size, device=place), 1e-5, 0.0)
    num_bytes = num_tokens * sizes.hidden_size * 2 * (2 + 4)

    def make_call() -> Callable[[], object]:
        x = torch.randn(shape, device=place).bfloat16()
        residual = torch.randn(shape, device=place)
        return lambda: elementwise.add_norm(device.module, x, residual, norm=norm)

    return Case(
        f"add and rms_norm, {num_tokens} x {sizes.hidden_size}",
        _calls(device, num_bytes, make_call),
        num_bytes,
    )


def act_mul_case(device: Device, sizes: Sizes, num_tokens: int) -> Case:
    size = sizes.intermediate_size
    num_bytes = num_tokens * size * 2 * 3

    def make_call() -> Callable[[], object]:
        gate_up = torch.randn(num_tokens, 2 * size, device=device.torch_device).bfloat16()
        out = gate_up.new_empty(num_tokens, size)
        return lambda: elementwise.act_mul(device.module, gate_up, "silu", out)

    return Case(f"act_mul, {num_tokens} x {size}", _calls(device, num_bytes, make_call), num_bytes)


def sampling_case(device: Device, sizes: Sizes, name: str, settings: dict[str, float]) -> Case:
    """One read of the logits is counted, whatever filters need."""
    place, num_rows = device.torch_device, sizes.num_seqs
    params = np.zeros(num_rows, SAMPLING_ROW)
    params["top_p"] = 1.0
    params["seed"] = np.arange(num_rows)
    for key, value in settings.items():
        params[key] = value
    rows = torch.from_numpy(params.view(np.uint8).reshape(num_rows, -1)).to(place)
    stages = sampling.stages_of(device.module, params)
    workspace = sampling.sampling_workspace(device.module, num_rows, sizes.vocab_size, place)
    num_bytes = num_rows * sizes.vocab_size * 4

    def make_call() -> Callable[[], object]:
        logits = torch.randn(num_rows, sizes.vocab_size, device=place).mul_(3.0)
        out = torch.empty(num_rows, 4, dtype=torch.int32, device=place)
        return lambda: sampling.sample_rows(
            device.module, logits, rows, workspace, stages=stages, out=out
        )

    return Case(
        f"sampling {name}, {num_rows} x {sizes.vocab_size}",
        _calls(device, num_bytes, make_call),
        num_bytes,
    )


def linear_case(device: Device, sizes: Sizes, kind: GGMLType, num_tokens: int) -> Case:
    """A product with few tokens: the matrix is what is read."""
    place = device.torch_device
    num_rows, num_cols = sizes.num_rows, sizes.intermediate_size
    matrix = _random_matrix(kind, num_rows, num_cols, place)
    x = torch.randn(num_tokens, num_cols, device=place).bfloat16()
    num_bytes = matrix.num_bytes + x.nbytes + num_tokens * num_rows * 2

    def make_call() -> Callable[[], object]:
        weights = linear.DeviceWeights([_copy(matrix)], [None])
        out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=place)
        return lambda: linear.stacked_linear(device.module, x, weights, out)

    return Case(
        f"product {kind.name}, {num_tokens} x {num_cols} -> {num_rows}",
        _calls(device, num_bytes, make_call),
        num_bytes,
    )


def cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    for heads in sizes.heads:
        yield attention_case(device, sizes, heads, torch.bfloat16)
    yield attention_case(device, sizes, sizes.heads[0], torch.float8_e4m3fn)
    for num_tokens in sizes.num_tokens:
        yield norm_case(device, sizes, num_tokens)
        yield act_mul_case(device, sizes, num_tokens)
    yield sampling_case(device, sizes, "greedy", {})
    yield sampling_case(device, sizes, "by temperature", {"temperature": 1.0})
    filters = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    yield sampling_case(device, sizes, "by top-k and top-p", filters)
    for kind in (GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.BF16):
        for num_tokens in (1, 8):
            yield linear_case(device, sizes, kind, num_tokens)


def _calls(
    device: Device, num_bytes: int, make_call: Callable[[], Callable[[], object]]
) -> list[Callable[[], object]]:
    calls = [make_call() for _ in range(device.num_copies(num_bytes))]
    return calls if device.is_emulated else calls * -(-_MIN_CALLS // len(calls))


def _random_matrix(
    kind: GGMLType, num_rows: int, num_cols: int, place: torch.device
) -> DeviceMatrix:
    if not kind.is_quantized:
        values = torch.randn(num_rows, num_cols, device=place).bfloat16()
        return pack_weight(Weight.from_tensor(values))
    shape = (num_rows, num_cols // kind.block_len, kind.block_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
    scale = torch.full((1,), 0.01, dtype=torch.float16, device=place).view(torch.uint8)
    for offset in _SCALES[kind]:
        blocks[:, :, offset : offset + 2] = scale
    return pack_weight(Weight(blocks.view(num_rows, -1), kind, num_rows, num_cols))


def _copy(matrix: DeviceMatrix) -> DeviceMatrix:
    planes = {
        name: plane.clone()
        for name in ("low", "high", "scales", "super_scales")
        if (plane := getattr(matrix, name)) is not None
    }
    return dataclasses.replace(matrix, **planes)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    figures = Figures(options.figures, has_targets=not options.tiny)
    with open_device(is_tiny=options.tiny) as device, torch.inference_mode():
        roofs = measure_roofs(device, figures)
        for case in cases(device, _TINY if options.tiny else _FULL):
            seconds = device.seconds(case.calls)
            figures.add(
                case.name,
                case.num_bytes / seconds / 1e9,
                "GB/s",
                bound=roofs.gb_per_s,
                least_share=case.least_share,
                note=f"{seconds * 1e6:,.1f} us",
            )


if __name__ == "__main__":
    main()
