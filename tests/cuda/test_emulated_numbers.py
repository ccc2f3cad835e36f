"""The emulator's half, bfloat16 and fp8 against torch's, over all values and all roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda.test_emulator import mutants

__all__ = ["mutants"]

FORMATS = [
    ("half", torch.float16, torch.int16),
    ("bfloat16", torch.bfloat16, torch.int16),
    ("fp8", torch.float8_e4m3fn, torch.int8),
]


def all_values(dtype: torch.dtype, integer: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a format, in the order of the bits."""
    info = torch.iinfo(integer)
    return torch.arange(info.min, info.max + 1).to(integer).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors are equal, zero's sign included; any NaN equals any other."""
    bits = a.view(torch.int32) == b.view(torch.int32)
    return bool((bits | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize(("name", "dtype", "integer"), FORMATS, ids=[f[0] for f in FORMATS])
def test_decode(mutants: Any, name: str, dtype: torch.dtype, integer: torch.dtype) -> None:
    values = all_values(dtype, integer)
    out = torch.empty(len(values))
    getattr(mutants, f"decode_{name}")(values.data_ptr(), out.data_ptr(), len(values))
    assert same_bits(out, values.float())


@pytest.mark.parametrize(("name", "dtype", "integer"), FORMATS, ids=[f[0] for f in FORMATS])
def test_encode(mutants: Any, name: str, dtype: torch.dtype, integer: torch.dtype) -> None:
    """Every value of the format, every middle between two, and the floats on both sides of it."""
    exact = all_values(dtype, integer).float().unique()
    exact = exact[exact.isfinite()]
    middles = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    largest = exact.max()
    extremes = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38])
    x = torch.cat([exact, middles, extremes, torch.stack([largest * 1.03, largest * 1.04])])
    inf = torch.tensor(float("inf"))
    x = torch.cat([x, torch.nextafter(x, inf), torch.nextafter(x, -inf)])
    out = torch.empty(len(x), dtype=integer)
    getattr(mutants, f"encode_{name}")(x.data_ptr(), out.data_ptr(), len(x))
    # fp8 saturates, which torch's conversion does not
    expected = (x.clamp(-largest, largest) if name == "fp8" else x).to(dtype)
    assert same_bits(out.view(dtype).float(), expected.float())
