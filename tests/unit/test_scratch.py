"""Buffers of a layer's values: which are used again, and which outlive their use."""

from __future__ import annotations

import weakref

import pytest
import torch

from llmserve.layers import Scratch


def buffer_of(tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
    assert tensor._base is not None
    return weakref.ref(tensor._base)


def test_a_role_has_one_buffer_as_large_as_its_largest_use() -> None:
    scratch = Scratch(torch.device("cpu"), torch.float32)

    small = scratch.take("a", 2, 3).data_ptr()
    large = scratch.take("a", 5, 3)

    assert scratch.take("a", 2, 3).data_ptr() == large.data_ptr()
    assert scratch.take("b", 2, 3).data_ptr() not in (small, large.data_ptr())
    assert large.shape == (5, 3)


def test_the_same_shape_gives_the_same_tensor_until_another_is_taken() -> None:
    scratch = Scratch(torch.device("cpu"), torch.float32)
    first = scratch.take("a", 2, 3)

    assert scratch.take("a", 2, 3) is first
    assert scratch.take("a", 3, 2).shape == (3, 2)
    assert scratch.take("a", 4, 5).shape == (4, 5)
    again = scratch.take("a", 2, 3)
    assert again.data_ptr() == scratch.take("a", 4, 5).data_ptr()


@pytest.mark.parametrize(("device", "is_kept"), [("cpu", False), ("meta", True)])
def test_graphs_of_a_device_keep_the_buffers_that_they_know(device: str, is_kept: bool) -> None:
    """meta: in place of a GPU."""
    scratch = Scratch(torch.device(device), torch.float32)
    outgrown = buffer_of(scratch.take("a", 2, 3))

    newest = buffer_of(scratch.take("a", 5, 3))

    assert (outgrown() is not None) == is_kept
    assert newest() is not None
