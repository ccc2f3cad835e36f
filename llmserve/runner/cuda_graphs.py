"""CUDA graphs of decode steps: which there are, and when graphs are captured.

A decode step launches hundreds of kernels that run for microseconds each; a graph launches them at
once. A graph is for a number of sequences and a longest context: steps are padded to the next
number, and kernels launch as many blocks as the longest context may need. Graphs exist for 1, 2, 4,
8, ... sequences and for contexts of 1024, 4096, 16384, ... tokens.

A graph is captured behind the first step that could have used it, which runs kernel by kernel: no
answer waits for a graph, and the device computes while the graph is made. Steps with prompts have
graphs of their own: piecewise_graphs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

_FIRST_CONTEXT = 1024
_CONTEXT_RATIO = 4

Key = TypeVar("Key")
Graph = TypeVar("Graph")


class GraphKey(NamedTuple):
    """Sizes that a graph is made for."""

    num_seqs: int
    max_seq_len: int


class Recorder(Protocol):
    """Makes graphs."""

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """What launches again the kernels that `body` launches, on the same addresses."""
        ...

    def record_pieces(self, body: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        """The same in pieces, one more than calls of the function that `body` is given: each call
        ends a piece. `body` runs twice, and what it leaves behind the second time is the graphs'.
        """
        ...


class LazyGraphs(Generic[Key, Graph]):
    """Graphs by key, each captured behind the first step that looked for it. For one thread."""

    def __init__(self, kind: str) -> None:
        """kind: of the steps, for the log."""
        self._kind = kind
        self._graphs: dict[Key, Graph] = {}
        self._wanted: Key | None = None
        self._is_off = False

    def find(self, key: Key) -> Graph | None:
        """None where there is no such graph yet: capture_wanted() is due once the step has been
        launched in another way."""
        graph = self._graphs.get(key)
        if graph is None and not self._is_off:
            self._wanted = key
        return graph

    def capture_wanted(self, capture: Callable[[Key], Graph]) -> None:
        """Captures the graph that find() missed last, if any."""
        key, self._wanted = self._wanted, None
        if key is None or key in self._graphs:
            return
        try:
            self._graphs[key] = capture(key)
        except RuntimeError as error:  # torch's own for lack of memory is one
            self._is_off = True
            logger.warning("no more CUDA graphs of %s are captured: %s", self._kind, error)


class DecodeGraphs:
    """Graphs of decode steps by their sizes. For one thread."""

    def __init__(
        self,
        recorder: Recorder,
        body: Callable[[GraphKey], None],
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """body: launches a decode step of these sizes; it may read what pads the step."""
        self._recorder = recorder
        self._body = body
        self._sizes = _batch_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._graphs: LazyGraphs[GraphKey, Callable[[], None]] = LazyGraphs("decode steps")

    def key(self, num_seqs: int, max_seq_len: int) -> GraphKey:
        """The smallest graph that a step of these sizes fits into."""
        size = next(size for size in self._sizes if size >= num_seqs)
        context = _FIRST_CONTEXT
        while context < max_seq_len:
            context *= _CONTEXT_RATIO
        return GraphKey(size, min(context, self._max_model_len))

    def find(self, key: GraphKey) -> Callable[[], None] | None:
        """What launches the step; None as LazyGraphs says."""
        return self._graphs.find(key)

    def capture_wanted(self, prepare: Callable[[GraphKey], None]) -> None:
        """Captures the graph that find() missed last, if any. prepare: lets the body run twice."""

        def capture(key: GraphKey) -> Callable[[], None]:
            prepare(key)
            return self._recorder.record(lambda: self._body(key))

        self._graphs.capture_wanted(capture)


class CUDARecorder:
    """Graphs of torch. They share their memory, as no two of them run at the same time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        self._pool = torch.cuda.graph_pool_handle()
        # A pool whose last graph has gone can take no other one.
        self._newest: torch.cuda.CUDAGraph | None = None

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        (replay,) = self.record_pieces(lambda cut: body())
        return replay

    def record_pieces(self, body: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin_piece() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # The other thread may wait for its events meanwhile.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end_piece() -> None:
            graphs[-1].capture_end()
            self._newest = graphs[-1]

        def cut() -> None:
            end_piece()
            begin_piece()

        with torch.cuda.stream(self._stream):
            body(lambda: None)  # libraries set themselves up, which a capture would not bear
            begin_piece()
            try:
                body(cut)
            finally:
                end_piece()
        current.wait_stream(self._stream)
        return [graph.replay for graph in graphs]


def _batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, ... max_num_seqs."""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return sizes
