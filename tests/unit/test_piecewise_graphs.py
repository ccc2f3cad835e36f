"""Which graph in pieces a step with prompts takes, and how it goes through one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from llmserve.runner.piecewise_graphs import SIZES, PiecewiseGraphs

NUM_LAYERS = 2


class FakeKernels:
    """Notes the attention that is computed."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._take: Callable[[Any], None] | None = None

    @contextmanager
    def attention_left_to(self, take: Callable[[Any], None]) -> Iterator[None]:
        self._take = take
        yield
        self._take = None

    def paged_attention(self, layer: str) -> None:
        assert self._take is not None
        self._take(layer)

    def compute_attention(self, call: str, groups: list[str], num_tokens: int) -> None:
        self._log.append(f"attention {call} of {groups[0]}, {num_tokens} tokens")


class FakeRecorder:
    """Names pieces by their graph; fails from the `max_graphs`-th graph on."""

    def __init__(self, log: list[str], max_graphs: int = 100) -> None:
        self.num_graphs = 0
        self._log = log
        self._max_graphs = max_graphs

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("graphs of prompts are in pieces")

    def record_pieces(self, body: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        if self.num_graphs == self._max_graphs:
            raise RuntimeError("no memory for the graph")
        self.num_graphs += 1
        ends: list[None] = []
        body(lambda: None)
        body(lambda: ends.append(None))
        return [self._piece(f"graph {self.num_graphs}.{i}") for i in range(len(ends) + 1)]

    def _piece(self, name: str) -> Callable[[], None]:
        return lambda: self._log.append(name)


class Steps:
    """Graphs over a forward pass that has attention twice."""

    def __init__(self, max_num_tokens: int = 2048, max_graphs: int = 100) -> None:
        self.log: list[str] = []
        self.prepared: list[int] = []
        self.recorder = FakeRecorder(self.log, max_graphs)
        self._kernels = FakeKernels(self.log)
        self.graphs = PiecewiseGraphs(
            self.recorder,
            self._kernels,
            self._forward,
            max_num_tokens,  # type: ignore[arg-type]
        )

    def step(self, num_tokens: int) -> torch.Tensor | None:
        """What the step gives if it went through a graph."""
        size = self.graphs.size(num_tokens)
        assert size is not None
        graph = self.graphs.find(size)
        groups: Any = [f"step of {num_tokens}"]
        hidden = None if graph is None else graph.run(groups, num_tokens)
        self.graphs.capture_wanted(self.prepared.append)
        return hidden

    def _forward(self, num_tokens: int) -> torch.Tensor:
        for layer in range(NUM_LAYERS):
            self._kernels.paged_attention(f"{layer}")
        return torch.arange(num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [(1, 8), (8, 8), (9, 16), (33, 48), (64, 64), (65, 80), (129, 160), (512, 512), (513, None)],
)
def test_step_is_padded_to_the_next_size(num_tokens: int, size: int | None) -> None:
    assert Steps().graphs.size(num_tokens) == size


def test_largest_graph_is_as_large_as_the_largest_step() -> None:
    graphs = Steps(max_num_tokens=100).graphs

    assert [graphs.size(n) for n in (96, 97, 100, 101)] == [96, 100, 100, None]


def test_little_is_computed_for_nothing() -> None:
    for below, size in itertools.pairwise(SIZES):
        assert size - below - 1 <= max(15, size // 5)


def test_graph_is_captured_behind_the_first_step_that_wants_it() -> None:
    steps = Steps()

    hidden = [steps.step(n) for n in (5, 6, 12, 8)]

    assert [rows is not None for rows in hidden] == [False, True, False, True]
    assert steps.prepared == [8, 16]
    assert hidden[1] is not None
    assert hidden[1].tolist() == list(range(6))


def test_attention_of_the_step_runs_between_the_pieces() -> None:
    steps = Steps()

    steps.step(5)
    steps.step(6)

    assert steps.log == [
        "graph 1.0",
        "attention 0 of step of 6, 6 tokens",
        "graph 1.1",
        "attention 1 of step of 6, 6 tokens",
        "graph 1.2",
    ]


def test_lack_of_memory_ends_capturing_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(max_graphs=1)

    with caplog.at_level(logging.WARNING):
        hidden = [steps.step(n) for n in (5, 5, 12, 12, 30, 5)]

    assert [rows is not None for rows in hidden] == [False, True, False, False, False, True]
    assert caplog.text.count("no memory for the graph") == 1
    assert "steps with prompts" in caplog.text
