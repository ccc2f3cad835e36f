"""Which graph a decode step takes, and when one is captured."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from llmserve.runner.cuda_graphs import CUDARecorder, DecodeGraphs, GraphKey


class FakeRecorder:
    """Notes what was recorded and what was replayed; fails from the `max_graphs`-th graph on."""

    def __init__(self, max_graphs: int = 1000) -> None:
        self.max_graphs = max_graphs
        self.num_graphs = 0

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        if self.num_graphs == self.max_graphs:
            raise RuntimeError("no memory for the graph")
        self.num_graphs += 1
        return body


class Steps:
    """Graphs over bodies that note their keys."""

    def __init__(self, recorder: FakeRecorder, max_num_seqs: int = 24) -> None:
        self.run: list[GraphKey] = []
        self.prepared: list[GraphKey] = []
        self.graphs = DecodeGraphs(
            recorder, self.run.append, max_num_seqs=max_num_seqs, max_model_len=40_000
        )

    def step(self, num_seqs: int, max_seq_len: int = 10) -> bool:
        """Whether the step went through a graph."""
        graph = self.graphs.find(self.graphs.key(num_seqs, max_seq_len))
        if graph is not None:
            graph()
        self.graphs.capture_wanted(self.prepared.append)
        return graph is not None


@pytest.mark.parametrize(
    ("num_seqs", "size"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (24, 24)],
)
def test_step_is_padded_to_the_next_size(num_seqs: int, size: int) -> None:
    assert Steps(FakeRecorder()).graphs.key(num_seqs, 10) == (size, 1024)


@pytest.mark.parametrize(
    ("max_seq_len", "context"),
    [(1, 1024), (1024, 1024), (1025, 4096), (5000, 16384), (30_000, 40_000)],
)
def test_graph_is_for_the_next_longest_context(max_seq_len: int, context: int) -> None:
    assert Steps(FakeRecorder()).graphs.key(1, max_seq_len) == (1, context)


def test_graph_is_captured_behind_the_first_step_that_wants_it() -> None:
    recorder = FakeRecorder()
    steps = Steps(recorder)

    went_through_graph = [steps.step(3), steps.step(4), steps.step(2), steps.step(2), steps.step(3)]

    assert went_through_graph == [False, True, False, True, True]
    assert steps.prepared == [(4, 1024), (2, 1024)]
    assert steps.run == [(4, 1024), (2, 1024), (4, 1024)]
    assert recorder.num_graphs == 2


def test_graph_that_cannot_be_captured_ends_capturing_and_leaves_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = Steps(FakeRecorder(max_graphs=1))

    with caplog.at_level(logging.WARNING):
        went_through_graph = [steps.step(n) for n in (1, 1, 2, 2, 2, 1)]

    assert went_through_graph == [False, True, False, False, False, True]
    assert steps.prepared == [(1, 1024), (2, 1024)]
    assert caplog.text.count("no memory for the graph") == 1


def replace_graphs(monkeypatch: pytest.MonkeyPatch, graph: type) -> None:
    """A class in place of torch's graphs, without a GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))


def test_graphs_may_be_dropped_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to capture into a pool whose graphs have all gone."""
    captured: list[weakref.ref[Any]] = []

    class Graph:
        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            assert (pool, capture_error_mode) == ((0, 1), "thread_local")
            assert not captured or any(graph() is not None for graph in captured)

        def capture_end(self) -> None:
            captured.append(weakref.ref(self))

        def replay(self) -> None:
            pass

    replace_graphs(monkeypatch, Graph)
    recorder = CUDARecorder()
    runs: list[int] = []

    for number in range(3):
        recorder.record(lambda number=number: runs.append(number))

    assert runs == [0, 0, 1, 1, 2, 2]  # each before its capture as well
    assert sum(graph() is not None for graph in captured) == 1


def test_graphs_in_pieces_are_captured_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    numbers = itertools.count()

    class Graph:
        def __init__(self) -> None:
            self.number = next(numbers)

        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            log.append(f"begin {self.number}")

        def capture_end(self) -> None:
            log.append(f"end {self.number}")

        def replay(self) -> None:
            log.append(f"replay {self.number}")

    def body(cut: Callable[[], None]) -> None:
        log.append("first half")
        cut()
        log.append("second half")

    replace_graphs(monkeypatch, Graph)

    replays = CUDARecorder().record_pieces(body)

    assert log == [
        *("first half", "second half"),
        *("begin 0", "first half", "end 0"),
        *("begin 1", "second half", "end 1"),
    ]
    log.clear()
    for replay in replays:
        replay()
    assert log == ["replay 0", "replay 1"]
