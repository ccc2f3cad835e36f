"""Recordings, which stand in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmserve.kernels.cuda import elementwise
from tests.cuda_emulator.recording import Recording


@pytest.fixture(autouse=True)
def _without_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU has graphs")


def test_a_replay_computes_from_and_into_the_memory_of_the_recording(cuda_module: Any) -> None:
    x = torch.ones(2, 8)
    recording = Recording()
    with recording.noting():
        doubled = x * 2
        recording.end_piece()
        product = elementwise.act_mul(cuda_module, doubled, "silu")
    first, second = recording.replays()
    before = product.clone()

    x.fill_(3.0)
    first()
    after_first = product.clone()
    second()

    assert torch.equal(doubled, torch.full((2, 8), 6.0))
    assert torch.equal(after_first, before)
    expected = torch.nn.functional.silu(torch.full((2, 4), 6.0)) * 6.0
    assert torch.allclose(product, expected)


def test_a_replay_into_memory_that_was_given_back_is_an_error(cuda_module: Any) -> None:
    x, out = torch.ones(2, 8), torch.empty(2, 4)
    recording = Recording()
    with recording.noting():
        elementwise.act_mul(cuda_module, x, "silu", out)
    (replay,) = recording.replays()
    replay()

    del out

    with pytest.raises(RuntimeError, match=r"the float32 tensor \[2, 4\] is gone"):
        replay()
