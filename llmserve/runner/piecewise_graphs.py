"""CUDA graphs of steps with prompts, in pieces: which there are, and how a step goes through one.

Between two calls of attention the kernels of a step depend on its number of tokens alone, and a
graph launches them at once. Attention depends on the lengths of the step's sequences and is
launched by itself, between two graphs: a step of a model with 28 layers is 29 graphs and 28 calls
of attention, instead of some 300 launches.

Steps are padded to the next size of a list, with tokens whose K and V go nowhere and which
attention leaves out. What is in their rows does not matter: no kernel and no product mixes rows.
Steps of more tokens than the largest size compute for longer than their kernels take to launch, and
run kernel by kernel. Models know nothing of this: the kernels hand the calls of attention over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from llmserve.kernels.cuda.kernels import AttentionCall, CUDAKernels
from llmserve.layers import AttentionInputs
from llmserve.runner.cuda_graphs import LazyGraphs, Recorder

# Up to 32 by the numbers of tokens at which products change from one kernel to another
# (kernels/cuda/linear.py), so that padding does not change the kernel; then in steps of a quarter
# of a power of two, so that a fifth of the rows at most, or 15 of them, is computed for nothing.
SIZES = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class PiecewiseGraph:
    """A forward pass of so many tokens, cut at its calls of attention."""

    def __init__(
        self,
        kernels: CUDAKernels,
        pieces: Sequence[Callable[[], None]],
        calls: Sequence[AttentionCall],
        hidden: torch.Tensor,
    ) -> None:
        """pieces: one more than calls. hidden: what the last piece fills. The tensors of the calls
        lie between two pieces, and in the memory of both: they live as long as the graph."""
        self._kernels = kernels
        self._pieces = pieces
        self._calls = calls
        self._hidden = hidden

    def run(self, groups: Sequence[AttentionInputs], num_tokens: int) -> torch.Tensor:
        """Hidden states of a step's tokens, as of Decoder.forward. The pieces read the padded step
        where the capture did; groups: the step as it is."""
        for piece, call in zip(self._pieces, self._calls, strict=False):
            piece()
            self._kernels.compute_attention(call, groups, num_tokens)
        self._pieces[-1]()
        return self._hidden[:num_tokens]


class PiecewiseGraphs:
    """Graphs by number of tokens, captured as decode graphs are. For one thread."""

    def __init__(
        self,
        recorder: Recorder,
        kernels: CUDAKernels,
        forward: Callable[[int], torch.Tensor],
        max_num_tokens: int,
    ) -> None:
        """forward: launches a forward pass of so many tokens and returns the hidden states.
        max_num_tokens: of a step."""
        self._recorder = recorder
        self._kernels = kernels
        self._forward = forward
        largest = min(max_num_tokens, SIZES[-1])
        self._sizes = [*(size for size in SIZES if size < largest), largest]
        self._graphs: LazyGraphs[int, PiecewiseGraph] = LazyGraphs("steps with prompts")

    def size(self, num_tokens: int) -> int | None:
        """Tokens of the smallest graph that a step fits into, None if it fits into none."""
        return next((size for size in self._sizes if size >= num_tokens), None)

    def find(self, size: int) -> PiecewiseGraph | None:
        """None as LazyGraphs says."""
        return self._graphs.find(size)

    def capture_wanted(self, prepare: Callable[[int], None]) -> None:
        """Captures the graph that find() missed last, if any. prepare: lets `forward` run twice."""

        def capture(size: int) -> PiecewiseGraph:
            prepare(size)
            return self._capture(size)

        self._graphs.capture_wanted(capture)

    def _capture(self, size: int) -> PiecewiseGraph:
        calls: list[AttentionCall] = []
        results: list[torch.Tensor] = []

        def body(end_piece: Callable[[], None]) -> None:
            calls.clear()
            results.clear()

            def take(call: AttentionCall) -> None:
                calls.append(call)
                end_piece()

            with self._kernels.attention_left_to(take):
                results.append(self._forward(size))

        pieces = self._recorder.record_pieces(body)
        return PiecewiseGraph(self._kernels, pieces, calls, results[0])
