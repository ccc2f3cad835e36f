"""Row and element kernels: norm and residual, activation, embedding, soft-cap, bias, and copies of
rows, blocks and tokens.

Activations are float32, float16 or bfloat16; the arithmetic is in float32. A row is reduced in an
order that depends on its length and alignment alone, so it has the same bits among any others.
Every function takes the compiled module first. Nothing here waits for the device, so ids and
positions in its memory are not checked: what each function says happens to wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llmserve.kernels.checks import describe
from llmserve.kernels.cuda.checks import (
    ACT_TYPES,
    check,
    norm_arguments,
    row_strides,
    stream_of,
)
from llmserve.kernels.cuda.transfer import upload_bytes
from llmserve.kernels.layer_parameters import NormParameters

# Numbered as Activation in ext/include/llmserve/cuda/elementwise.h.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}

_FLOAT32 = (torch.float32,)


def rms_norm(
    module: Any,
    x: torch.Tensor,
    norm: NormParameters,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight_offset + weight) over the last dimension.

    x: float32 or of the type of `out`, [size], [num_tokens, size] or [num_tokens, num_heads, size];
    all dimensions but the last may be strided. Returns `out` (which may be x) or a new tensor of
    `out_dtype`, by default x's. Raises ValueError for a wrong dtype, shape, layout or device.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    _add_norm(module, x, None, None, norm, 1.0, out)
    return out


def add_norm(
    module: Any,
    x: torch.Tensor,
    residual: torch.Tensor,
    *,
    post: NormParameters | None = None,
    norm: NormParameters | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += scale * post(x) in place; returns norm(residual), in `out` or in x.

    A norm that is None leaves its input as it is. residual: float32, of x's shape; the rest as in
    rms_norm.
    """
    out = x if out is None else out
    _add_norm(module, x, residual, post, norm, scale, out)
    return out


def _add_norm(
    module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post: NormParameters | None,
    norm: NormParameters | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    device, size = x.device, x.shape[-1]
    out_strides = row_strides("out", out, ACT_TYPES, device)
    x_strides = row_strides("x", x, {torch.float32, out.dtype}, device)
    residual_strides = (0, 0)
    if residual is not None:
        residual_strides = row_strides("residual", residual, _FLOAT32, device)
    for name, other in (("out", out), ("residual", residual)):
        if other is not None and other.shape != x.shape:
            raise ValueError(
                f"{name} must have the shape {tuple(x.shape)} of x, not {tuple(other.shape)}"
            )
    if size > module.max_norm_size:
        raise ValueError(f"rows have {size} values; at most {module.max_norm_size} are supported")
    module.add_norm(
        x.data_ptr(),
        ACT_TYPES[x.dtype],
        *x_strides,
        0 if residual is None else residual.data_ptr(),
        *residual_strides,
        out.data_ptr(),
        ACT_TYPES[out.dtype],
        *out_strides,
        *norm_arguments("post", post, size, device),
        *norm_arguments("norm", norm, size, device),
        scale,
        x.shape[0] if x.dim() > 1 else 1,
        x.shape[1] if x.dim() > 2 else 1,
        size,
        stream_of(x),
    )


def act_mul(
    module: Any, gate_up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """activation(gate) * up.

    gate_up: activations [num_tokens, 2 * size], gate first; tokens may be strided. activation:
    "silu", "gelu" (exact) or "gelu_tanh". Returns [num_tokens, size] of the same type: `out` if
    given, whose tokens may be strided, else a new tensor. Raises ValueError for another activation
    or a wrong dtype, shape, layout or device.
    """
    stride, _ = row_strides("gate_up", gate_up, ACT_TYPES, gate_up.device)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up must have the shape [num_tokens, 2 * size], not {tuple(gate_up.shape)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; known are {', '.join(ACTIVATIONS)}")
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(num_tokens, size)
    out_stride, _ = row_strides("out", out, (gate_up.dtype,), gate_up.device)
    _check_shape("out", out, (num_tokens, size))
    module.act_mul(
        gate_up.data_ptr(),
        ACT_TYPES[gate_up.dtype],
        stride,
        ACTIVATIONS[activation],
        out.data_ptr(),
        out_stride,
        num_tokens,
        size,
        stream_of(gate_up),
    )
    return out


def embedding(
    module: Any,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows `token_ids` (int64 [num_tokens], contiguous) of a table times `scale`.

    table: float32, float16 or bfloat16 [num_rows, size]; rows may be strided. Returns float32
    [num_tokens, size], `out` if given; an id outside the table gives zeros. Raises ValueError for a
    wrong dtype, shape, layout or device.
    """
    stride, _ = row_strides("table", table, ACT_TYPES, token_ids.device)
    if table.dim() != 2:
        raise ValueError(f"table must have the shape [num_rows, size], not {tuple(table.shape)}")
    (num_tokens,) = token_ids.shape
    num_rows, size = table.shape
    ids = check("token_ids", token_ids, torch.int64, (num_tokens,), table.device)
    if out is None:
        out = torch.empty(num_tokens, size, device=table.device)
    check("out", out, torch.float32, (num_tokens, size), table.device)
    module.embedding(
        ids,
        table.data_ptr(),
        ACT_TYPES[table.dtype],
        stride,
        num_rows,
        scale,
        out.data_ptr(),
        num_tokens,
        size,
        stream_of(table),
    )
    return out


def softcap(module: Any, x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cap * tanh(x / cap) in place; returns x.

    x: float32 of any shape, contiguous. Raises ValueError for a wrong dtype or layout, or a cap
    that is not positive.
    """
    address = check("x", x, torch.float32, tuple(x.shape), x.device)
    if not cap > 0.0:
        raise ValueError(f"cap is {cap}; it must be above 0")
    module.softcap(address, x.numel(), cap, stream_of(x))
    return x


def add_bias(module: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x += bias in place; returns x.

    x: activations [num_tokens, size], tokens may be strided; bias: float32 [size], of stacked
    products the biases one after the other. Raises ValueError for a wrong dtype, shape, layout or
    device.
    """
    stride, _ = row_strides("x", x, ACT_TYPES, x.device)
    if x.dim() != 2:
        raise ValueError(f"x must have the shape [num_tokens, size], not {tuple(x.shape)}")
    num_tokens, size = x.shape
    bias_address = check("bias", bias, torch.float32, (size,), x.device)
    arguments = (x.data_ptr(), ACT_TYPES[x.dtype], stride, bias_address)
    module.add_bias(*arguments, num_tokens, size, stream_of(x))
    return x


def gather_rows(
    module: Any, x: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows `row_ids` (int64 [n], contiguous) of x; a negative id gives zeros.

    x: any dtype [num_rows, size], rows may be strided. Returns [n, size], contiguous: `out` if
    given, else a new tensor. Ids beyond the rows are not checked. Raises ValueError for a wrong
    dtype, shape, layout or device.
    """
    stride, _ = row_strides("x", x, (x.dtype,), row_ids.device)
    if x.dim() != 2:
        raise ValueError(f"x must have the shape [num_rows, size], not {tuple(x.shape)}")
    shape = (row_ids.numel(), x.shape[1])
    ids = check("row_ids", row_ids, torch.int64, shape[:1], x.device)
    out = x.new_empty(shape) if out is None else out
    out_address = check("out", out, x.dtype, shape, x.device)
    item = x.element_size()
    row_bytes = shape[1] * item
    module.gather_rows(
        x.data_ptr(), stride * item, row_bytes, ids, shape[0], out_address, stream_of(x)
    )
    return out


class BlockCopier:
    """Copies blocks of several caches of one shape, such as K and V of all layers, in one launch.

    caches: any dtype [num_blocks, ...] each, each block contiguous, all with the same strides.
    Raises ValueError for caches that differ or lie otherwise.
    """

    def __init__(self, module: Any, caches: Sequence[torch.Tensor]) -> None:
        first = caches[0]
        for cache in caches:
            if (
                cache.shape != first.shape
                or cache.dtype != first.dtype
                or cache.stride() != first.stride()
                or cache.device != first.device
                or not cache[:1].is_contiguous()
            ):
                raise ValueError(
                    f"caches must be alike, each block contiguous, not {describe(first)} and "
                    f"{describe(cache)}"
                )
        self._module = module
        self._caches = list(caches)
        addresses = [cache.data_ptr() for cache in caches]
        self._addresses = torch.tensor(addresses, device=first.device)
        self._stride_bytes = first.stride(0) * first.element_size()
        self._block_bytes = first[:1].nbytes
        sizes = (*addresses, self._stride_bytes, self._block_bytes)
        self._is_vectorized = all(size % 16 == 0 for size in sizes)

    def copy(self, block_copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, target) pair after pair.

        Raises IndexError for a block outside the caches.
        """
        num_blocks = self._caches[0].shape[0]
        for block_id in (block_id for pair in block_copies for block_id in pair):
            if not 0 <= block_id < num_blocks:
                raise IndexError(f"block {block_id} does not exist; the cache has {num_blocks}")
        for pairs in _independent(block_copies):
            (table,) = upload_bytes([torch.tensor(pairs)], self._addresses.device)
            self._module.copy_blocks(
                self._addresses.data_ptr(),
                len(self._caches),
                self._stride_bytes,
                self._block_bytes,
                table.data_ptr(),
                len(pairs),
                self._is_vectorized,
                stream_of(table),
            )


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of copies of which none writes a block that another one reads or writes."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source == target:
            continue
        if source in written or target in written or target in read:
            yield run
            run, read, written = [], set(), set()
        run.append((source, target))
        read.add(source)
        written.add(target)
    if run:
        yield run


def feed_tokens(
    module: Any, input_ids: torch.Tensor, source_rows: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """input_ids[i] = last_tokens[source_rows[i]] where source_rows[i] >= 0, in place.

    input_ids: int64 [num_tokens]; source_rows: int32 [num_tokens]; last_tokens: int32 [max_rows];
    all contiguous. Rows beyond last_tokens are not checked. Raises ValueError for a wrong dtype,
    shape, layout or device.
    """
    (num_tokens,) = input_ids.shape
    device = input_ids.device
    module.feed_tokens(
        check("input_ids", input_ids, torch.int64, (num_tokens,), device),
        check("source_rows", source_rows, torch.int32, (num_tokens,), device),
        check("last_tokens", last_tokens, torch.int32, tuple(last_tokens.shape), device),
        num_tokens,
        stream_of(input_ids),
    )


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {tuple(x.shape)}")
